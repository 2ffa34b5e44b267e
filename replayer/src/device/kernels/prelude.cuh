// What comes before the kernels of every file: one line of code for a C compiler and for NVRTC.
//
// No header, no shared memory, no atomics, and only what C and CUDA C++ have in common: NVRTC
// compiles it without a toolkit, the tests compile it with a C compiler and run every kernel on
// machines without a GPU.

#ifdef HOST
#define EXPORT
#define DEVICE static inline
#define KERNEL(name, Args) void name(const Args *given, long long thread)
#define BEGIN(Args) const Args a = *given; if (thread >= a.threads) return
double exp(double), tanh(double), fabs(double), sqrt(double), rint(double);
double fmax(double, double), fmin(double, double);
float fmaf(float, float, float);
#else
#define DEVICE static __device__
#define KERNEL(name, Args) extern "C" __global__ void name(const Args a)
#define BEGIN(Args) const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x; \
    if (thread >= a.threads) return
#endif

typedef long long i64;
typedef unsigned long long u64;

#define LARGEST 1.7976931348623157e308

DEVICE int is_finite(double x) { return fabs(x) <= LARGEST; }

// How elements lie in a dump.
enum { BF16 = 0, F16 = 1, F32 = 2, F64 = 3 };

DEVICE double of_f32_bits(unsigned bits) {
    union { unsigned bits; float value; } b;
    b.bits = bits;
    return (double)b.value;
}

// Binary16 by its fields: a subnormal is a multiple of 2^-24.
DEVICE double of_f16_bits(unsigned bits) {
    unsigned exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
    double sign = bits & 0x8000u ? -1.0 : 1.0;
    if (exponent == 0) return sign * (double)fraction * 5.9604644775390625e-08;
    if (exponent == 31 && fraction == 0) return sign * of_f32_bits(0x7f800000u);
    // NaN keeps its sign, as its bits are counted.
    if (exponent == 31) return of_f32_bits((bits & 0x8000u) << 16 | 0x7fc00000u | fraction << 13);
    return sign * of_f32_bits(((exponent + 112u) << 23) | (fraction << 13));
}

// Exactly the value of element number `at`.
DEVICE double element(const void *from, i64 dtype, i64 at) {
    switch (dtype) {
        case BF16: return of_f32_bits((unsigned)((const unsigned short *)from)[at] << 16);
        case F16: return of_f16_bits(((const unsigned short *)from)[at]);
        case F32: return (double)((const float *)from)[at];
        default: return ((const double *)from)[at];
    }
}

typedef union { unsigned bits; float value; } Single;

DEVICE float single_of(unsigned bits) { Single s; s.bits = bits; return s.value; }
DEVICE unsigned bits_of(float value) { Single s; s.value = value; return s.bits; }

// exp and tanh in f32, as kernels/policy/exp.rs has them.

#define MAGIC 12582912.0f
#define LOG2_E 1.4426950408889634f

// Unsigned inside: the exponent that NaN leads to may be any.
DEVICE float power_of_two(int exponent) { return single_of(((unsigned)exponent + 127u) << 23); }

DEVICE float expm1_reduced(float r) {
    float p = 0.00019852762f;
    p = fmaf(p, r, 0.0013930435f);
    p = fmaf(p, r, 0.008333361f);
    p = fmaf(p, r, 0.041666485f);
    p = fmaf(p, r, 0.16666667f);
    p = fmaf(p, r, 0.5f);
    return fmaf(r * r, p, r);
}

DEVICE float reduced(float x, float whole) {
    return fmaf(whole, 2.1219444e-4f, fmaf(whole, -0.6933594f, x));
}

DEVICE float exp_of(float x) {
    // Comparing this way round lets NaN through.
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = fmaf(x, LOG2_E, MAGIC);
    int exponent = (int)(bits_of(shifted) - bits_of(MAGIC));
    float value = 1.0f + expm1_reduced(reduced(x, shifted - MAGIC));
    // Two factors: one power of two cannot reach 2^-150 or 2^128.
    int half = exponent >> 1, rest = (int)((unsigned)exponent - (unsigned)half);
    return value * power_of_two(half) * power_of_two(rest);
}

DEVICE float tanh_of(float x) {
    float y = -2.0f * single_of(bits_of(x) & 0x7fffffffu);
    y = y < -40.0f ? -40.0f : y;
    float shifted = fmaf(y, LOG2_E, MAGIC);
    float power = power_of_two((int)(bits_of(shifted) - bits_of(MAGIC)));
    float m = fmaf(power, expm1_reduced(reduced(y, shifted - MAGIC)), power - 1.0f);
    float size = -m / (2.0f + m);
    return single_of((bits_of(size) & 0x7fffffffu) | (bits_of(x) & 0x80000000u));
}
