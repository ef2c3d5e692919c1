// The codecs that keep all elements: one pass over memory per kernel, equal to tests/kernels/reference.py bit for bit. Begins after
// elements.cu.

template <typename C, typename T>
__device__ inline void encode(const T* x, u64 elements, u8* encoded, u32* refused) {
    const u64 tile = tile_of_warp();
    if (tile * TILE >= elements) return;
    const Work<C> work(x, elements, tile);
    float v[8];
    read(x, elements, work.lane, v);
    u32 magnitude = 0;
    for (u32 j = 0; j < 8; ++j) magnitude = max(magnitude, __float_as_uint(v[j]) & ABS);
    const u32 scale = scale_of(largest(magnitude, work.lanes));
    if (scale >= NO_SCALE) *refused = 1;
    if (work.block >= work.blocks) return;

    const float factor = factor_of(scale, C::levels);
    u32 q[8];
    for (u32 j = 0; j < 8; ++j) q[j] = quantised(v[j], factor);
    u32* values = reinterpret_cast<u32*>(encoded) + work.block * (C::block * C::bits / 32) + work.part;
    if (C::bits == 8) {
        values[0] = packed(q, 0xFF);
        values[work.lanes] = packed(q + 4, 0xFF);
    } else {
        values[0] = packed(q, 0xF) | packed(q + 4, 0xF) << 4;
    }
    if (work.part == 0) reinterpret_cast<u16*>(encoded + work.blocks * (C::block * C::bits / 8))[work.block] = scale;
}

template <typename C, typename T>
__device__ inline void decode(const u8* encoded, u64 elements, T* x) {
    const u64 tile = tile_of_warp();
    if (tile * TILE >= elements) return;
    const Work<C> work(x, elements, tile);
    float v[8] = {};
    if (work.block < work.blocks) {
        const u32* values = reinterpret_cast<const u32*>(encoded) + work.block * (C::block * C::bits / 32) + work.part;
        const u32 scale = reinterpret_cast<const u16*>(encoded + work.blocks * (C::block * C::bits / 8))[work.block];
        const float step = step_of(scale, C::levels);
        const u32 first = values[0], second = C::bits == 8 ? values[work.lanes] : first >> 4;
        for (u32 j = 0; j < 4; ++j) {
            v[j] = restored(first, 8 * j, C::bits, step);
            v[4 + j] = restored(second, 8 * j, C::bits, step);
        }
    }
    write(v, elements, work.lane, x);
}

template <typename T>
__device__ inline void encode_raw16(const T* x, u64 elements, u8* encoded) {
    const u64 tile = tile_of_warp();
    if (tile * TILE >= elements) return;
    const Work<I8B256> work(x, elements, tile);
    float v[8];
    read(x, elements, work.lane, v);
    for (u32 j = 0; j < 8; ++j) v[j] = quiet(v[j]);
    write(v, elements, work.lane, reinterpret_cast<bfloat16*>(encoded));
}

template <typename T>
__device__ inline void decode_raw16(const u8* encoded, u64 elements, T* x) {
    const u64 tile = tile_of_warp();
    if (tile * TILE >= elements) return;
    const Work<I8B256> work(x, elements, tile);
    float v[8];
    read(reinterpret_cast<const bfloat16*>(encoded), elements, work.lane, v);
    write(v, elements, work.lane, x);
}

#define FOR_TYPE(type)                                                                                            \
    KERNELS(raw16, type, encode_raw16(x, elements, encoded), decode_raw16(encoded, elements, x))                  \
    KERNELS(i8b256, type, encode<I8B256>(x, elements, encoded, refused), decode<I8B256>(encoded, elements, x))    \
    KERNELS(i4b64, type, encode<I4B64>(x, elements, encoded, refused), decode<I4B64>(encoded, elements, x))

FOR_TYPE(float)
FOR_TYPE(bfloat16)
