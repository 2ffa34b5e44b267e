// What comes before the kernels of every file: one line of code for a C compiler and for NVRTC.
//
// No header, no shared memory, no atomics, and only what C and CUDA C++ have in common: NVRTC
// compiles it without a toolkit, the tests compile it with a C compiler and run every kernel on
// machines without a GPU.

#ifdef HOST
#define EXPORT
#define DEVICE static
#define KERNEL(name, Args) void name(const Args *given, long long thread)
#define BEGIN(Args) const Args a = *given; if (thread >= a.threads) return
double exp(double), tanh(double), fabs(double), fmax(double, double);
float fmaf(float, float, float);
#else
#define DEVICE static __device__
#define KERNEL(name, Args) extern "C" __global__ void name(const Args a)
#define BEGIN(Args) const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x; \
    if (thread >= a.threads) return
#endif

typedef long long i64;
typedef unsigned long long u64;
