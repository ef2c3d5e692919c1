// The codecs that keep the largest elements alone: one pass over memory per kernel, equal to tests/kernels/reference.py bit for bit.
// Begins after elements.cu. A warp has one block: a tile of TOPK, or of TOP64's 4,096 elements.

struct Topk {
    static constexpr u32 block = 256, kept = 8, levels = 127;
};
struct Top64 {
    static constexpr u32 block = 4096, kept = 64, group = 64, slots = 64, bytes = 80;
};

template <typename T>
__device__ inline void encode_topk(const T* x, u64 elements, u8* encoded, u32* refused) {
    const u64 block = tile_of_warp(), blocks = (elements + Topk::block - 1) / Topk::block;
    if (block >= blocks) return;
    const u32 lane = threadIdx.x % LANES;
    const u64 at = block * Topk::block + 8 * lane;  // eight in a row, so that the first lane has the first of equal elements
    float v[8];
    read(x, elements, lane_at(x, elements, block, at, at + 4), v);

    u32 left[8];  // magnitude + 1, 0 once taken
    for (u32 j = 0; j < 8; ++j) left[j] = (__float_as_uint(v[j]) & ABS) + 1;
    u32 magnitude = 0;
    for (u32 taken = 0; taken < Topk::kept; ++taken) {
        u32 own = 0;
        for (u32 j = 0; j < 8; ++j) own = max(own, left[j]);
        const u32 most = largest(own, LANES);
        if (taken == 0) magnitude = most - 1;
        if (lane + 1 == static_cast<u32>(__ffs(__ballot_sync(ALL, own == most)))) {
            bool found = false;
            for (u32 j = 0; j < 8; ++j) {
                const bool here = !found && left[j] == most;
                left[j] = here ? 0 : left[j];
                found = found || here;
            }
        }
    }
    const u32 scale = scale_of(magnitude);
    if (scale >= NO_SCALE) *refused = 1;
    const float factor = factor_of(scale, Topk::levels);

    u64 slot = block * Topk::kept;
    for (u32 j = 0; j < 8; ++j) slot += __popc(__ballot_sync(ALL, left[j] == 0) & ((1u << lane) - 1));
    for (u32 j = 0; j < 8; ++j) {
        if (left[j] == 0) {
            encoded[slot] = quantised(v[j], factor);
            encoded[blocks * Topk::kept + slot] = 8 * lane + j;
            ++slot;
        }
    }
    if (lane == 0) reinterpret_cast<u16*>(encoded + blocks * (2 * Topk::kept))[block] = scale;
}

template <typename T>
__device__ inline void decode_topk(const u8* encoded, u64 elements, T* x) {
    __shared__ float rows[WARPS][TILE];
    const u64 block = tile_of_warp(), blocks = (elements + Topk::block - 1) / Topk::block;
    if (block >= blocks) return;
    const u32 lane = threadIdx.x % LANES;
    float* row = rows[threadIdx.x / LANES];
    for (u32 j = 0; j < 8; ++j) row[lane + LANES * j] = 0.0f;
    __syncwarp();
    if (lane < Topk::kept) {
        const u64 slot = block * Topk::kept + lane;
        const u32 scale = reinterpret_cast<const u16*>(encoded + blocks * (2 * Topk::kept))[block];
        row[encoded[blocks * Topk::kept + slot]] = restored(encoded[slot], 0, 8, step_of(scale, Topk::levels));
    }
    __syncwarp();
    const Work<I8B256> work(x, elements, block);
    float v[8];
    for (u32 j = 0; j < 4; ++j) v[j] = row[4 * lane + j], v[4 + j] = row[TILE / 2 + 4 * lane + j];
    write(v, elements, work.lane, x);
}

// ---- TOP64. Element 32 j + lane of a block is the lane's j-th.

constexpr u32 EACH = Top64::block / LANES;

__device__ inline u32 magnitude_of(float x) { return __float_as_uint(x) & ABS; }

// The sum of all lanes' values.
__device__ inline u32 total(u32 value) {
    for (u32 apart = LANES / 2; apart; apart /= 2) value += __shfl_xor_sync(ALL, value, apart);
    return value;
}

// The number of the block's magnitudes that reach `bound`.
__device__ inline u32 reaching(const float (&v)[EACH], u32 bound) {
    u32 count = 0;
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) count += magnitude_of(v[j]) >= bound;
    return total(count);
}

// The mean of `count` magnitudes. Each lane has two slots, `first` and 32 further on.
__device__ inline float mean_of(float first, float second, u32 count) {
    float sum = __fadd_rn(__fmul_rn(first, 1.0f / 64), __fmul_rn(second, 1.0f / 64));
    for (u32 apart = LANES / 2; apart; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, apart));
    return __fdiv_rn(sum, __fmul_rn(__int2float_rn(static_cast<int>(count)), 1.0f / 64));
}

template <typename T>
__device__ inline void encode_top64(const T* x, u64 elements, u8* encoded, u32* refused) {
    __shared__ float kept[WARPS][Top64::slots];
    __shared__ u8 places[WARPS][Top64::slots];
    const u64 block = tile_of_warp(), blocks = (elements + Top64::block - 1) / Top64::block;
    if (block >= blocks) return;
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, before = (1u << lane) - 1;
    float v[EACH];
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u64 at = block * Top64::block + LANES * j + lane;
        v[j] = at < elements ? loaded(x[at]) : 0.0f;
    }
    if (reaching(v, INFINITE)) *refused = 1;

    // The largest bound that at least 64 reach, or any that exactly 64 reach; SMALLEST if fewer reach it.
    u32 bound = SMALLEST, above = ABS;
    for (u32 count = reaching(v, bound); count > Top64::kept && above - bound > 1;) {
        const u32 middle = bound + (above - bound) / 2, reached = reaching(v, middle);
        if (reached < Top64::kept) above = middle;
        else bound = middle, count = reached;
    }
    u32 equals = Top64::kept - reaching(v, bound + 1);  // at most so many that equal the bound are kept, the first ones

    for (u32 slot = lane; slot < Top64::slots; slot += LANES) kept[warp][slot] = 0.0f, places[warp][slot] = 0;
    __syncwarp();
    u32 count = 0, ends = 0;
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 magnitude = magnitude_of(v[j]), equal = __ballot_sync(ALL, magnitude == bound);
        const bool mine = magnitude > bound || (magnitude == bound && __popc(equal & before) < equals);
        const u32 chosen = __ballot_sync(ALL, mine);
        if (mine) {
            const u32 slot = count + __popc(chosen & before);
            kept[warp][slot] = v[j], places[warp][slot] = (LANES * j + lane) % Top64::group;
        }
        count += __popc(chosen);
        equals -= static_cast<u32>(__popc(equal)) < equals ? __popc(equal) : equals;
        const u32 end = count + j / 2;  // of the group, after its second half
        if (j % 2 && end / 32 == lane) ends |= 1u << end % 32;
    }
    __syncwarp();

    float own[2], size[2];
    bool is_large[2];
    for (u32 k = 0; k < 2; ++k) {
        own[k] = kept[warp][lane + LANES * k];
        size[k] = __uint_as_float(magnitude_of(own[k]));
    }
    const float mean = mean_of(size[0], size[1], count);
    for (u32 k = 0; k < 2; ++k) is_large[k] = count && size[k] > mean;
    const u32 larger = total(is_large[0] + is_large[1]);
    const float of_large = mean_of(is_large[0] ? size[0] : 0.0f, is_large[1] ? size[1] : 0.0f, larger);
    const float of_small = mean_of(is_large[0] ? 0.0f : size[0], is_large[1] ? 0.0f : size[1], count - larger);
    u32 large = larger ? rounded(of_large) : 0;
    const u32 small = count > larger ? rounded(of_small) : large;
    large = larger ? large : small;
    if (small >= NO_SCALE || large >= NO_SCALE) *refused = 1;

    for (u32 k = 0; k < 2; ++k) {
        const u32 slot = lane + LANES * k, sign = __float_as_uint(own[k]) >> 31;
        encoded[block * Top64::slots + slot] = slot < count ? places[warp][slot] | is_large[k] << 6 | sign << 7 : 0;
    }
    if (lane < 4) reinterpret_cast<u32*>(encoded + blocks * Top64::slots)[4 * block + lane] = ends;
    if (lane == 0) reinterpret_cast<u32*>(encoded + blocks * Top64::bytes)[block] = small | large << 16;
}

template <typename T>
__device__ inline void decode_top64(const u8* encoded, u64 elements, T* x) {
    const u64 block = tile_of_warp(), blocks = (elements + Top64::block - 1) / Top64::block;
    if (block >= blocks) return;
    const u32 lane = threadIdx.x % LANES;
    for (u32 j = 0; j < EACH; ++j) {
        const u64 at = block * Top64::block + LANES * j + lane;
        if (at < elements) store(0.0f, x[at]);
    }
    __syncwarp();
    const u32* ends = reinterpret_cast<const u32*>(encoded + blocks * Top64::slots) + 4 * block;
    const u32 scales = reinterpret_cast<const u32*>(encoded + blocks * Top64::bytes)[block];
    u32 slot = 0, group = 0;
    for (u32 bit = 0; bit < 128 && group < Top64::group; ++bit) {
        if (ends[bit / 32] >> bit % 32 & 1) {
            ++group;
            continue;
        }
        if (slot % LANES == lane) {
            const u32 byte = encoded[block * Top64::slots + slot];
            const u64 at = block * Top64::block + Top64::group * group + byte % Top64::group;
            const float value = widened(byte & 64 ? scales >> 16 : scales & 0xFFFF);
            if (at < elements) store(byte & 128 ? -value : value, x[at]);
        }
        ++slot;
    }
}

#define FOR_TYPE(type)                                                                                            \
    KERNELS(topk, type, encode_topk(x, elements, encoded, refused), decode_topk(encoded, elements, x))            \
    KERNELS(top64, type, encode_top64(x, elements, encoded, refused), decode_top64(encoded, elements, x))

FOR_TYPE(float)
FOR_TYPE(bfloat16)
