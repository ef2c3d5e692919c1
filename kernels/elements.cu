// What codecs.cu and sparse.cu share: elements, scales and values as layout.py describes them, on a GPU. gpu.py compiles this text
// and then one of theirs, which include no header, with NVRTC.
//
// A warp has a tile of 256 elements: one to four blocks. Each of its lanes has eight elements of one block, four in each half of
// the block, so that neighbouring lanes read and write neighbouring memory. Every kernel is launched with 256 threads per thread
// block and one warp per tile.
//
// Every operation on floats is one that rounds explicitly: the compiler turns plain * and + into fused multiply-adds, which
// round once instead of twice. CuPy flushes denormals to zero; layout.py keeps them out of everything that is quantised.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 ALL = 0xFFFFFFFF;  // lanes
constexpr u32 LANES = 32;
constexpr u32 WARPS = 8;  // per thread block
constexpr u32 TILE = 256;
constexpr u32 ABS = 0x7FFFFFFF;
constexpr u32 INFINITE = 0x7F800000;
constexpr u32 SMALLEST = 0x0D800000;  // 2^-100
constexpr u32 NO_SCALE = 0x7F80;  // bfloat16's infinity

struct I8B256 {
    static constexpr u32 block = 256, bits = 8, levels = 127;
};
struct I4B64 {
    static constexpr u32 block = 64, bits = 4, levels = 7;
};
// ---- Elements: float, or bfloat16, which is the upper half of a float.

struct bfloat16 {
    u16 bits;
};

// Bits of x as a bfloat16, rounded to nearest, halves to even. Call quiet() first: this turns some NaNs into infinities.
__device__ inline u16 rounded(float x) {
    const u32 bits = __float_as_uint(x);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// A NaN becomes a quiet one with the same sign and upper bits, which rounding keeps; other values are unchanged.
__device__ inline float quiet(float x) {
    const u32 bits = __float_as_uint(x);
    return __uint_as_float((bits & ABS) > INFINITE ? (bits | 0x400000) & 0xFFFF0000 : bits);
}

__device__ inline float widened(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
__device__ inline float loaded(float x) { return x; }
__device__ inline float loaded(bfloat16 x) { return widened(x.bits); }
__device__ inline void store(float x, float& to) { to = x; }
__device__ inline void store(float x, bfloat16& to) { to.bits = rounded(x); }

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

// A lane's eight elements: four from `first` on, four from `second` on. Elements past the end read as zero.
struct Lane {
    u64 first, second;
    bool whole;  // the tile is complete, and aligned for moving four elements at once
};

template <typename T>
__device__ inline Lane lane_at(const T* x, u64 elements, u64 tile, u64 first, u64 second) {
    const bool aligned = reinterpret_cast<u64>(x) % sizeof(Four<T>) == 0;
    return {first, second, aligned && (tile + 1) * TILE <= elements};
}

template <typename T>
__device__ inline void read(const T* x, u64 elements, const Lane& lane, float (&v)[8]) {
    if (lane.whole) {
        const Four<T>* fours = reinterpret_cast<const Four<T>*>(x);
        const Four<T> first = fours[lane.first / 4], second = fours[lane.second / 4];
        for (u32 j = 0; j < 4; ++j) v[j] = loaded(first.at[j]), v[4 + j] = loaded(second.at[j]);
    } else {
        for (u32 j = 0; j < 4; ++j) {
            v[j] = lane.first + j < elements ? loaded(x[lane.first + j]) : 0.0f;
            v[4 + j] = lane.second + j < elements ? loaded(x[lane.second + j]) : 0.0f;
        }
    }
}

template <typename T>
__device__ inline void write(const float (&v)[8], u64 elements, const Lane& lane, T* x) {
    if (lane.whole) {
        Four<T> first, second;
        for (u32 j = 0; j < 4; ++j) store(v[j], first.at[j]), store(v[4 + j], second.at[j]);
        Four<T>* fours = reinterpret_cast<Four<T>*>(x);  // not x + lane.first: NVRTC would split half of these accesses
        fours[lane.first / 4] = first, fours[lane.second / 4] = second;
    } else {
        for (u32 j = 0; j < 4; ++j) {
            if (lane.first + j < elements) store(v[j], x[lane.first + j]);
            if (lane.second + j < elements) store(v[4 + j], x[lane.second + j]);
        }
    }
}

// ---- Where a thread works.

__device__ inline u64 tile_of_warp() { return static_cast<u64>(blockIdx.x) * WARPS + threadIdx.x / LANES; }

// block / 8 lanes work on one block; `part` is a lane's number among them.
template <typename C>
struct Work {
    static constexpr u32 lanes = C::block / 8;
    u64 block, blocks;
    u32 part;
    Lane lane;

    template <typename T>
    __device__ Work(const T* x, u64 elements, u64 tile) {
        block = tile * (LANES / lanes) + threadIdx.x % LANES / lanes;
        blocks = (elements + C::block - 1) / C::block;
        part = threadIdx.x % lanes;
        const u64 at = block * C::block + 4 * part;
        lane = lane_at(x, elements, tile, at, at + C::block / 2);
    }
};

// ---- Scales.

// Bits of a block's scale; at least NO_SCALE when the block can have none.
__device__ inline u32 scale_of(u32 magnitude) { return magnitude < SMALLEST ? 0 : (magnitude + 0xFFFF) >> 16; }

__device__ inline float factor_of(u32 scale, u32 levels) {
    return scale ? __fdiv_rn(static_cast<float>(levels), widened(scale)) : 0.0f;
}

__device__ inline float step_of(u32 scale, u32 levels) { return __fdiv_rn(widened(scale), static_cast<float>(levels)); }

__device__ inline u32 quantised(float x, float factor) { return __float2int_rn(__fmul_rn(x, factor)); }

// The largest `value` among `lanes` neighbouring lanes.
__device__ inline u32 largest(u32 value, u32 lanes) {
    for (u32 apart = lanes / 2; apart; apart /= 2) value = max(value, __shfl_xor_sync(ALL, value, apart));
    return value;
}

// ---- Values: four of them are the bytes of a word, cut off above their bits.

__device__ inline u32 packed(const u32* q, u32 mask) {
    return (q[0] & mask) | (q[1] & mask) << 8 | (q[2] & mask) << 16 | (q[3] & mask) << 24;
}

__device__ inline float restored(u32 word, u32 lowest, u32 bits, float step) {
    const int value = static_cast<int>(word << (32 - bits - lowest)) >> (32 - bits);  // bits from `lowest` on, signed
    return __fmul_rn(__int2float_rn(value), step);
}

// ---- Kernels. Either all lanes of a warp return or none: the remaining lanes would wait for the others forever.

// `encoded` is aligned to eight bytes. `refused` becomes 1 when a block can have no scale.
#define KERNELS(codec, type, encode_it, decode_it)                                                                \
    extern "C" __global__ void codec##_encode_##type(const type* x, u64 elements, u8* encoded, u32* refused) {   \
        encode_it;                                                                                                \
    }                                                                                                             \
    extern "C" __global__ void codec##_decode_##type(const u8* encoded, u64 elements, type* x) { decode_it; }
