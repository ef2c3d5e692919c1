// Enough of CUDA for g++ to compile the kernels' .cu files, and to run them: the 32 lanes of a warp are contexts of one
// thread, which take turns. A lane runs until it exchanges something with its warp, then the next does. Lanes of a warp that meet
// at different operations, or that wait for a lane that has returned, end the launch: on a GPU they would hang, or read nonsense.
//
// Warps run one after another; hence no __syncthreads. Denormals are flushed to zero, as CuPy has it.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define __device__
#define __global__
#define __shared__ static

struct Dim3 {
    unsigned x;
};
static Dim3 blockIdx, threadIdx;

namespace emulated {

constexpr unsigned LANES = 32;
enum class Met { NOTHING, SHUFFLE, BALLOT, BARRIER, END };

static struct {
    ucontext_t contexts[LANES], scheduler;
    alignas(64) char stacks[LANES][1 << 16];
    unsigned exchanged[2][LANES];  // by turns: in one the lanes write while some still read the other
    unsigned turns[LANES];
    Met met[LANES];
    unsigned lane;
    void (*kernel)(uint64_t, uint64_t, uint64_t, uint64_t);
    const uint64_t* arguments;
} warp;

inline const unsigned* exchange(Met what, unsigned mask, unsigned value) {
    const unsigned lane = warp.lane, turn = warp.turns[lane]++ % 2;
    warp.exchanged[turn][lane] = value;
    warp.met[lane] = mask == 0xFFFFFFFF ? what : Met::NOTHING;
    swapcontext(&warp.contexts[lane], &warp.scheduler);
    return warp.exchanged[turn];
}

inline void run_lane() {
    warp.kernel(warp.arguments[0], warp.arguments[1], warp.arguments[2], warp.arguments[3]);
    warp.met[warp.lane] = Met::END;
}

// False where the lanes did not meet.
inline bool run_warp(unsigned first_thread, bool backwards) {
    for (unsigned lane = 0; lane < LANES; ++lane) {
        getcontext(&warp.contexts[lane]);
        warp.contexts[lane].uc_stack.ss_sp = warp.stacks[lane];
        warp.contexts[lane].uc_stack.ss_size = sizeof warp.stacks[lane];
        warp.contexts[lane].uc_link = &warp.scheduler;
        makecontext(&warp.contexts[lane], run_lane, 0);
        warp.turns[lane] = 0;
    }
    for (;;) {
        for (unsigned k = 0; k < LANES; ++k) {
            warp.lane = backwards ? LANES - 1 - k : k;
            threadIdx.x = first_thread + warp.lane;
            swapcontext(&warp.scheduler, &warp.contexts[warp.lane]);
        }
        for (unsigned lane = 0; lane < LANES; ++lane) {
            if (warp.met[lane] != warp.met[0] || warp.met[lane] == Met::NOTHING) return false;
        }
        if (warp.met[0] == Met::END) return true;
    }
}

}  // namespace emulated

// Runs ``kernel``, whose parameters are four words at most.
extern "C" int launch(void* kernel, unsigned thread_blocks, unsigned threads, const uint64_t* arguments) {
    emulated::warp.kernel = reinterpret_cast<void (*)(uint64_t, uint64_t, uint64_t, uint64_t)>(kernel);
    emulated::warp.arguments = arguments;
#if defined(__x86_64__)
    const unsigned rounding = _mm_getcsr();
    _mm_setcsr(rounding | 0x8040);  // flush to zero, denormals are zero
#elif defined(__aarch64__)
    uint64_t rounding;
    asm volatile("mrs %0, fpcr" : "=r"(rounding));
    asm volatile("msr fpcr, %0" : : "r"(rounding | 1 << 24));
#else
#error "no way is known here to flush denormals to zero"
#endif
    bool met = true;
    for (blockIdx.x = 0; met && blockIdx.x < thread_blocks; ++blockIdx.x) {
        for (unsigned first = 0; met && first < threads; first += emulated::LANES) {
            met = emulated::run_warp(first, blockIdx.x % 2 != 0);
        }
    }
#if defined(__x86_64__)
    _mm_setcsr(rounding);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(rounding));
#endif
    return met;
}

// ---- What they use of CUDA's own functions. Compiled with -ffp-contract=off, plain operators round one by one.

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    const double rounded = std::nearbyint(static_cast<double>(x));
    return rounded > 2147483647.0 ? 2147483647 : rounded < -2147483648.0 ? -2147483647 - 1 : static_cast<int>(rounded);
}
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned apart) {
    return emulated::exchange(emulated::Met::SHUFFLE, mask, value)[emulated::warp.lane ^ apart];
}
inline float __shfl_xor_sync(unsigned mask, float value, unsigned apart) {
    return __uint_as_float(__shfl_xor_sync(mask, __float_as_uint(value), apart));
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
    const unsigned* all = emulated::exchange(emulated::Met::BALLOT, mask, mine);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < emulated::LANES; ++lane) bits |= all[lane] << lane;
    return bits;
}
inline void __syncwarp() { emulated::exchange(emulated::Met::BARRIER, 0xFFFFFFFF, 0); }
