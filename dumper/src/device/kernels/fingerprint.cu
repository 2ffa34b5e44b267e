// The position-sensitive fingerprint of src/fingerprint.rs, of bytes where they lie on a device.
//
// No header and only what C and CUDA C++ have in common: NVRTC compiles it without a toolkit, the
// tests compile it with a C compiler. Two sums modulo 2^32: integers, so the order of the
// additions, atomics among them, changes no bit. Every field is 8 bytes wide.

#ifdef HOST
#define DEVICE static
#define KERNEL(name, Args) void name(const Args *given, long long thread)
#define BEGIN(Args) const Args a = *given; if (thread >= a.threads) return
#define ADD(to, x) (*(to) += (x))
#else
#define DEVICE static __device__
#define KERNEL(name, Args) extern "C" __global__ void name(const Args a)
#define BEGIN(Args) const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x; \
    if (thread >= a.threads) return
#define ADD(to, x) atomicAdd((to), (x))
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

// What a record may have, and the words of an element of 8 bytes.
#define DIMENSIONS 33

typedef struct {
    i64 threads;
    // The box in C order: `words` words of `width` bytes, 1, 2 or 4.
    const void *from;
    i64 words, width;
    // Two sums, added to.
    u32 *sums;
    i64 dimensions;
    // Of each dimension the first global index, and how many words apart its indices lie.
    u64 first[DIMENSIONS], stride[DIMENSIONS];
} Fingerprint;

DEVICE u32 fmix(u32 h) {
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
}

DEVICE u32 word_at(const Fingerprint *a, i64 at) {
    switch (a->width) {
        case 1: return ((const unsigned char *)a->from)[at];
        case 2: return ((const unsigned short *)a->from)[at];
        default: return ((const u32 *)a->from)[at];
    }
}

// A thread looks at every `threads`-th word: neighbours read neighbours.
KERNEL(fingerprint, Fingerprint) {
    BEGIN(Fingerprint);
    u32 first = 0, second = 0;
    for (i64 at = thread; at < a.words; at += a.threads) {
        u32 h = 0x9747b28cu;
        u64 rest = (u64)at;
        for (i64 dim = 0; dim < a.dimensions; dim++) {
            u64 index = rest / a.stride[dim];
            rest -= index * a.stride[dim];
            h = fmix(h + ((u32)(a.first[dim] + index) + 1u) * 0x9e3779b1u);
        }
        u32 lane = fmix(h ^ (word_at(&a, at) * 0x85ebca77u));
        first += lane;
        second += fmix(lane ^ 0xc2b2ae3du);
    }
    ADD(a.sums, first);
    ADD(a.sums + 1, second);
}
