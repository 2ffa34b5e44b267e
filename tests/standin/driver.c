// The stand-in of libcuda: devices, contexts and what errors are called.
//
// BACKTAPE_STANDIN_DEVICES says how many devices there are, 1 if unset.

#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int initialised;
static Context contexts[MOST_DEVICES];

// The contexts that are current on this thread, the last on top.
#define DEEPEST 16
static __thread Context *stack[DEEPEST];
static __thread int depth;

int standin_devices(void) {
    const char *devices = getenv("BACKTAPE_STANDIN_DEVICES");
    int count = devices ? atoi(devices) : 1;
    return count > MOST_DEVICES ? MOST_DEVICES : count;
}

Context *standin_current(void) { return depth ? stack[depth - 1] : NULL; }

Stream *standin_stream(void *handle, int *error) {
    Context *current = standin_current();
    *error = CUDA_SUCCESS;
    if (!current) {
        *error = refuse(CUDA_ERROR_INVALID_CONTEXT, "a call on a thread without a current context");
        return NULL;
    }
    if (current->dead) {
        *error = current->dead;
        return NULL;
    }
    // The null stream and CU_STREAM_LEGACY.
    if (handle == NULL || handle == (void *)1) return current->streams;
    for (Stream *stream = current->streams; stream; stream = stream->next)
        if (stream == handle && !stream->destroyed) return stream;
    *error = refuse(CUDA_ERROR_INVALID_HANDLE, "no stream of the current context");
    return NULL;
}

EXPORT int cuInit(unsigned flags) {
    CALL("cuInit");
    if (flags) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuInit with flags"));
    initialised = 1;
    done(CUDA_SUCCESS);
}

EXPORT int cuDeviceGetCount(int *count) {
    CALL("cuDeviceGetCount");
    if (!initialised) done(refuse(CUDA_ERROR_NOT_INITIALIZED, "cuDeviceGetCount before cuInit"));
    *count = standin_devices();
    done(CUDA_SUCCESS);
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    CALL("cuDeviceGet");
    if (!initialised) done(refuse(CUDA_ERROR_NOT_INITIALIZED, "cuDeviceGet before cuInit"));
    if (ordinal < 0 || ordinal >= standin_devices()) done(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    done(CUDA_SUCCESS);
}

EXPORT int cuDeviceGetName(char *name, int length, int device) {
    CALL("cuDeviceGetName");
    if (device < 0 || device >= standin_devices()) done(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "stand-in %d (for tests, no GPU)", device);
    done(CUDA_SUCCESS);
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL("cuDeviceGetAttribute");
    if (device < 0 || device >= standin_devices()) done(CUDA_ERROR_INVALID_DEVICE);
    const char *pools = getenv("BACKTAPE_STANDIN_POOLS");
    switch (attribute) {
        case 75: *value = 9; done(CUDA_SUCCESS);  // compute capability, major
        case 76: *value = 0; done(CUDA_SUCCESS);  // and minor
        case 97: *value = 232448; done(CUDA_SUCCESS);  // shared memory of a block that opts in
        case 115: *value = !pools || atoi(pools); done(CUDA_SUCCESS);  // memory pools
        default: done(refuse(CUDA_ERROR_INVALID_VALUE, "the stand-in knows no attribute %d", attribute));
    }
}

EXPORT int cuDevicePrimaryCtxRetain(Context **context, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    if (!initialised) done(refuse(CUDA_ERROR_NOT_INITIALIZED, "cuDevicePrimaryCtxRetain before cuInit"));
    if (device < 0 || device >= standin_devices()) done(CUDA_ERROR_INVALID_DEVICE);
    Context *of = &contexts[device];
    of->device = device;
    of->retained++;
    if (!of->streams) stream_of(of, 0);
    *context = of;
    done(CUDA_SUCCESS);
}

// The last one to let go of it ends it: what is on its streams is done first. Its memory lives on
// here, as the stand-in cannot tell a leak from what another library keeps.
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    CALL("cuDevicePrimaryCtxRelease");
    Context *of = &contexts[device];
    if (device < 0 || device >= standin_devices() || !of->retained)
        done(refuse(CUDA_ERROR_INVALID_CONTEXT, "a context is released that nobody holds"));
    if (--of->retained == 0) {
        advance_all(of);
        of->dead = 0;
    }
    done(CUDA_SUCCESS);
}

EXPORT int cuCtxGetCurrent(Context **context) {
    CALL("cuCtxGetCurrent");
    if (!initialised) done(refuse(CUDA_ERROR_NOT_INITIALIZED, "cuCtxGetCurrent before cuInit"));
    *context = standin_current();
    done(CUDA_SUCCESS);
}

static int is_held(const Context *context) {
    return context >= contexts && context < contexts + MOST_DEVICES && context->retained;
}

EXPORT int cuCtxSetCurrent(Context *context) {
    CALL("cuCtxSetCurrent");
    if (context && !is_held(context)) done(refuse(CUDA_ERROR_INVALID_CONTEXT, "no context to be made current"));
    if (depth) depth--;
    if (context) stack[depth++] = context;
    done(CUDA_SUCCESS);
}

EXPORT int cuCtxPushCurrent_v2(Context *context) {
    CALL("cuCtxPushCurrent");
    if (!is_held(context)) done(refuse(CUDA_ERROR_INVALID_CONTEXT, "no context to be pushed"));
    if (depth == DEEPEST) undefined("contexts are pushed and never popped");
    stack[depth++] = context;
    done(CUDA_SUCCESS);
}

EXPORT int cuCtxPopCurrent_v2(Context **context) {
    CALL("cuCtxPopCurrent");
    if (!depth) done(refuse(CUDA_ERROR_INVALID_CONTEXT, "no context to be popped"));
    *context = stack[--depth];
    done(CUDA_SUCCESS);
}

static const struct { int error; const char *name, *says; } ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {CUDA_ERROR_FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int told(int error, const char **to, int name) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++) {
        if (ERRORS[i].error != error) continue;
        *to = name ? ERRORS[i].name : ERRORS[i].says;
        return CUDA_SUCCESS;
    }
    *to = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT int cuGetErrorName(int error, const char **name) { return told(error, name, 1); }
EXPORT int cuGetErrorString(int error, const char **says) { return told(error, says, 0); }
