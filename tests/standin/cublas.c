// The stand-in of libcublas: column-major products as the documentation defines them, one term after
// the other, on the handle's stream.
//
// A handle belongs to the context that was current when it was made, and is used with that one.

#include "standin.h"

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13,
       NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
enum { COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, COMPUTE_32F_FAST_TF32 = 77, COMPUTE_64F = 70 };

typedef struct { Context *context; void *stream; int math; } Handle;

// One operand: where it lies, as what, and how far apart its columns are.
typedef struct { char *at; int type, lead, transposed; } Matrix;

typedef struct {
    int m, n, k, compute;
    double alpha, beta;
    Matrix a, b, c;
} Gemm;

EXPORT int cublasCreate_v2(Handle **to) {
    CALL("cublasCreate");
    int error;
    if (!standin_stream(NULL, &error)) done(NOT_INITIALIZED);
    Handle *handle = calloc(1, sizeof *handle);
    handle->context = standin_current();
    *to = handle;
    done(SUCCESS);
}

// What a call needs: a live handle, and its context.
static int usable(const Handle *handle) {
    if (!handle || !handle->context) return refuse(NOT_INITIALIZED, "cuBLAS without a handle");
    if (standin_current() != handle->context)
        undefined("a handle of cuBLAS is used while another context than its own is current");
    return handle->context->dead ? EXECUTION_FAILED : SUCCESS;
}

EXPORT int cublasDestroy_v2(Handle *handle) {
    CALL("cublasDestroy");
    int error = usable(handle);
    if (error) done(error);
    handle->context = NULL;
    done(SUCCESS);
}

EXPORT int cublasSetStream_v2(Handle *handle, void *stream) {
    CALL("cublasSetStream");
    int error = usable(handle);
    if (error) done(error);
    if (!standin_stream(stream, &error)) done(INVALID_VALUE);
    handle->stream = stream;
    done(SUCCESS);
}

EXPORT int cublasSetMathMode(Handle *handle, int mode) {
    CALL("cublasSetMathMode");
    int error = usable(handle);
    if (error) done(error);
    if (mode < 0 || (mode & ~16) > 8) done(refuse(INVALID_VALUE, "the math mode %d", mode));
    handle->math = mode;
    done(SUCCESS);
}

static size_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

static float of_half(uint16_t bits) {
    union { uint32_t bits; float value; } all = {.bits = (uint32_t)(bits & 0x7fff) << 13};
    // The exponent's distance; subnormal and infinite ones by an exact product.
    all.value *= 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) all.bits |= 0x7f800000;
    all.bits |= (uint32_t)(bits & 0x8000) << 16;
    return all.value;
}

// An element as the product takes it.
static double element(const Matrix *of, long row, long column, int compute) {
    const char *at = of->at + (row + column * of->lead) * (long)size_of(of->type);
    union { uint32_t bits; float value; } all = {0};
    uint16_t half;
    if (of->type == R_64F) return *(const double *)at;
    if (of->type == R_32F) {
        memcpy(&all, at, 4);
        // TF32 keeps 10 bits of the fraction.
        if (compute == COMPUTE_32F_FAST_TF32) all.bits &= 0xffffe000;
        return all.value;
    }
    memcpy(&half, at, 2);
    if (of->type == R_16F) return of_half(half);
    all.bits = (uint32_t)half << 16;
    return all.value;
}

static int multiply(void *data) {
    const Gemm *g = data;
    for (long j = 0; j < g->n; j++) {
        for (long i = 0; i < g->m; i++) {
            double sum = 0;
            float single = 0;
            for (long l = 0; l < g->k; l++) {
                double a = g->a.transposed ? element(&g->a, l, i, g->compute) : element(&g->a, i, l, g->compute);
                double b = g->b.transposed ? element(&g->b, j, l, g->compute) : element(&g->b, l, j, g->compute);
                if (g->compute == COMPUTE_64F) sum += a * b;
                else single += (float)a * (float)b;
            }
            // Where beta is 0, C need not hold a number.
            if (g->compute == COMPUTE_64F) {
                double *c = (double *)g->c.at + i + j * g->c.lead;
                *c = g->beta == 0 ? g->alpha * sum : g->alpha * sum + g->beta * *c;
            } else {
                float *c = (float *)g->c.at + i + j * g->c.lead, scaled = (float)g->alpha * single;
                *c = g->beta == 0 ? scaled : scaled + (float)g->beta * *c;
            }
        }
    }
    return CUDA_SUCCESS;
}

// Rows of a matrix as it lies, and its columns: all of it in live memory of the device.
static int lies(const Handle *handle, const Matrix *of, long rows, long columns, const char *name) {
    if (of->lead < (rows > 1 ? rows : 1))
        return refuse(INVALID_VALUE, "ld%s is %d, the matrix has %ld rows", name, of->lead, rows);
    if (!rows || !columns) return SUCCESS;
    uint64_t bytes = ((columns - 1) * (uint64_t)of->lead + rows) * size_of(of->type);
    if ((uint64_t)of->at % size_of(of->type)) undefined("%s of a product is not aligned", name);
    if (!memory_holds(handle->context->device, (uint64_t)of->at, bytes))
        undefined("%s of a product, %ld columns of %ld, %d apart, is not all in memory of its device", name, columns,
                  rows, of->lead);
    return SUCCESS;
}

static int gemm(Handle *handle, Gemm given) {
    int error = usable(handle);
    if (error) return error;
    if (given.m < 0 || given.n < 0 || given.k < 0)
        return refuse(INVALID_VALUE, "a product of %d, %d and %d", given.m, given.n, given.k);
    if (given.m == 0 || given.n == 0) return SUCCESS;
    long m = given.m, n = given.n, k = given.k;
    const Matrix *a = &given.a, *b = &given.b;
    error = a->transposed ? lies(handle, a, k, m, "A") : lies(handle, a, m, k, "A");
    if (!error) error = b->transposed ? lies(handle, b, n, k, "B") : lies(handle, b, k, n, "B");
    if (!error) error = lies(handle, &given.c, m, n, "C");
    Stream *stream = error ? NULL : standin_stream(handle->stream, &error);
    if (!stream) return error == INVALID_VALUE ? error : EXECUTION_FAILED;
    Gemm *data = malloc(sizeof *data);
    *data = given;
    enqueue(stream, multiply, data, NULL, 0);
    return SUCCESS;
}

EXPORT int cublasDgemm_v2(Handle *handle, int transa, int transb, int m, int n, int k, const double *alpha,
                          const double *a, int lda, const double *b, int ldb, const double *beta, double *c, int ldc) {
    CALL("cublasDgemm");
    // N and T; C is T of real numbers.
    if (transa < 0 || transa > 2 || transb < 0 || transb > 2 || !alpha || !beta)
        done(refuse(INVALID_VALUE, "cublasDgemm with operations %d and %d", transa, transb));
    done(gemm(handle, (Gemm){m, n, k, COMPUTE_64F, *alpha, *beta, {(char *)a, R_64F, lda, transa != 0},
                             {(char *)b, R_64F, ldb, transb != 0}, {(char *)c, R_64F, ldc, 0}}));
}

// The rows of the documentation's table that end in sums and results in f32.
static int is_supported(int compute, int a, int b, int c) {
    int single = a == R_32F && b == R_32F && c == R_32F;
    int half = a == b && (a == R_16F || a == R_16BF) && c == R_32F;
    if (compute == COMPUTE_32F_FAST_TF32) return single;
    return (compute == COMPUTE_32F || compute == COMPUTE_32F_PEDANTIC) && (single || half);
}

EXPORT int cublasGemmEx(Handle *handle, int transa, int transb, int m, int n, int k, const void *alpha,
                        const void *a, int atype, int lda, const void *b, int btype, int ldb, const void *beta,
                        void *c, int ctype, int ldc, int compute, int algorithm) {
    CALL("cublasGemmEx");
    if (transa < 0 || transa > 2 || transb < 0 || transb > 2 || !alpha || !beta || algorithm < -1 || algorithm > 23)
        done(refuse(INVALID_VALUE, "cublasGemmEx with operations %d and %d", transa, transb));
    if (!is_supported(compute, atype, btype, ctype))
        done(refuse(NOT_SUPPORTED, "cublasGemmEx of types %d, %d and %d in %d", atype, btype, ctype, compute));
    // f32 in f32's own precision is asked for by that name: the handle's mode may allow tf32.
    if (handle && handle->math == 3 && compute == COMPUTE_32F && atype == R_32F) compute = COMPUTE_32F_FAST_TF32;
    done(gemm(handle, (Gemm){m, n, k, compute, *(const float *)alpha, *(const float *)beta,
                             {(char *)a, atype, lda, transa != 0}, {(char *)b, btype, ldb, transb != 0},
                             {(char *)c, ctype, ldc, 0}}));
}
