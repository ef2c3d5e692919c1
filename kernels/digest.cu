// BLAKE3 of a GPU's memory, as github.com/BLAKE3-team/BLAKE3-specs describes it (sections 2.2 to 2.5): the values of all chunks of
// 1024 bytes, then level by level those of their parents. A tree whose left half is the largest whole one is what comes of
// merging neighbours on each level and carrying an odd one up.
//
// gpu.py launches this with 256 threads per thread block, and compiles this text, which includes no header, with NVRTC.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 THREADS = 256;
constexpr u32 WORDS = 8;  // in a value
constexpr u32 BLOCK_WORDS = 16, BLOCK_BYTES = 64, CHUNK_BYTES = 1024;
constexpr u32 CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8;  // flags

struct alignas(16) Four {  // moved at once
    u32 at[4];
};

struct Value {
    u32 words[WORDS];
};

__device__ inline Value initial() {
    return {{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19}};
}

__device__ inline u32 rotated(u32 x, u32 by) { return x >> by | x << (32 - by); }

__device__ inline void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
    a += b + x;
    d = rotated(d ^ a, 16);
    c += d;
    b = rotated(b ^ c, 12);
    a += b + y;
    d = rotated(d ^ a, 8);
    c += d;
    b = rotated(b ^ c, 7);
}

__device__ inline void permute(u32* m) {
    const u32 before[BLOCK_WORDS] = {m[2], m[6],  m[3],  m[10], m[7], m[0],  m[4],  m[13],
                                     m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; ++i) m[i] = before[i];
}

// The compression function, of whose output a value is the first half. It uses up the block ``m``.
__device__ inline Value compressed(const Value& h, u32* m, u64 counter, u32 bytes, u32 flags) {
    const Value iv = initial();
    u32 v[16] = {h.words[0],  h.words[1],  h.words[2],  h.words[3],  h.words[4],
                 h.words[5],  h.words[6],  h.words[7],  iv.words[0], iv.words[1],
                 iv.words[2], iv.words[3], static_cast<u32>(counter), static_cast<u32>(counter >> 32), bytes, flags};
#pragma unroll
    for (u32 round = 0; round < 7; ++round) {
        mix(v[0], v[4], v[8], v[12], m[0], m[1]);
        mix(v[1], v[5], v[9], v[13], m[2], m[3]);
        mix(v[2], v[6], v[10], v[14], m[4], m[5]);
        mix(v[3], v[7], v[11], v[15], m[6], m[7]);
        mix(v[0], v[5], v[10], v[15], m[8], m[9]);
        mix(v[1], v[6], v[11], v[12], m[10], m[11]);
        mix(v[2], v[7], v[8], v[13], m[12], m[13]);
        mix(v[3], v[4], v[9], v[14], m[14], m[15]);
        if (round < 6) permute(m);
    }
    Value out;
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) out.words[i] = v[i] ^ v[i + 8];
    return out;
}

// Words of the next block; past the end of the data they are zero.
__device__ inline void load(const u8* data, u32 bytes, u32* m) {
    if (bytes == BLOCK_BYTES) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_WORDS; i += 4) {
            const Four four = *reinterpret_cast<const Four*>(data + 4 * i);
#pragma unroll
            for (u32 k = 0; k < 4; ++k) m[i + k] = four.at[k];
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < BLOCK_WORDS; ++i) {
        m[i] = 0;
        for (u32 byte = 4 * i; byte < bytes && byte < 4 * i + 4; ++byte) {
            m[i] |= static_cast<u32>(data[byte]) << 8 * (byte - 4 * i);
        }
    }
}

// One thread per chunk: the values of ``bytes`` of ``data`` (at a multiple of 16; at least one byte, and more than one chunk in
// all), whose first chunk has the number ``first``.
extern "C" __global__ void chunk_values(const u8* data, u64 bytes, u64 first, Value* values) {
    const u64 chunk = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u64 begin = chunk * CHUNK_BYTES;
    if (begin >= bytes) return;
    const u32 length = bytes - begin < CHUNK_BYTES ? static_cast<u32>(bytes - begin) : CHUNK_BYTES;
    Value value = initial();
    for (u32 at = 0; at < length; at += BLOCK_BYTES) {
        const u32 left = length - at < BLOCK_BYTES ? length - at : BLOCK_BYTES;
        u32 m[BLOCK_WORDS];
        load(data + begin + at, left, m);
        const u32 flags = (at == 0 ? CHUNK_START : 0) | (at + BLOCK_BYTES >= length ? CHUNK_END : 0);
        value = compressed(value, m, first + chunk, left, flags);
    }
    values[chunk] = value;
}

// One thread per parent: the values of the level above ``count`` of ``below``. ``last`` is 1 where the only parent is the root.
extern "C" __global__ void parent_values(const Value* below, u64 count, u64 last, Value* above) {
    const u64 parent = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    const u64 left = 2 * parent;
    if (left >= count) return;
    if (left + 1 == count) {
        above[parent] = below[left];
        return;
    }
    u32 m[BLOCK_WORDS];
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i) {
        m[i] = below[left].words[i];
        m[i + WORDS] = below[left + 1].words[i];
    }
    above[parent] = compressed(initial(), m, 0, BLOCK_BYTES, PARENT | (last ? ROOT : 0));
}
