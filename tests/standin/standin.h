// What the parts of the stand-in of NVIDIA's libraries share. It is no GPU and knows nothing of one:
// it is for tests, and shows only that our calls are as NVIDIA documents them.
//
// Device memory is memory of this process; work waits in its stream until somebody waits for it
// (`streams.c`), so that a wait that is missing gives wrong bytes. What the documentation names an
// error is answered with that error. What it leaves undefined ends the process with a sentence.

#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>
#include <stdint.h>

// Of all else the names are the library's own: libc has an `advance` too.
#define EXPORT __attribute__((visibility("default")))

// CUresult, as far as it is used.
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_FILE_NOT_FOUND = 301,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_UNKNOWN = 999,
};

#define MOST_DEVICES 8

typedef struct Stream Stream;

// A device's primary context; nobody here makes another.
typedef struct Context {
    int device;
    int retained;
    // An error that ends the context: every later call answers with it.
    int dead;
    // The legacy default stream, and a list of all of them that begins with it.
    Stream *streams;
} Context;

// Something on a stream. It comes after all before it on the stream, and after what another stream
// held up to a number.
typedef struct Op {
    struct Op *next;
    uint64_t number;
    Stream *after;
    uint64_t after_number;
    // Does it and gives a CUresult; null for what only waits.
    int (*run)(void *data);
    void *data;
} Op;

struct Stream {
    Context *context;
    // Waits for the legacy default stream, and it for this one.
    int blocking;
    int destroyed;
    Op *first, *last;
    Stream *next;
};

typedef struct {
    Context *context;
    unsigned flags;
    Stream *stream;
    uint64_t number;
    int recorded;
    // Milliseconds, once it has happened.
    double at;
} Event;

typedef struct Allocation {
    struct Allocation *next;
    uint64_t address, bytes;
    int device;
    // From the pool, by stream order.
    int pooled;
    // The begin of its pages, and how many bytes they are.
    char *pages;
    size_t length;
} Allocation;

// ---- calls.c: every function begins with CALL, and ends with done

EXPORT int standin_enter(const char *name);
EXPORT int standin_leave(int result);

// Takes the lock; where this call is the one that a test has fail, that is what it answers.
#define CALL(name) do { int failed_ = standin_enter(name); if (failed_) return standin_leave(failed_); } while (0)
#define done(result) return standin_leave(result)

// Says what the documentation forbids, and gives the error that it names.
EXPORT int refuse(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Says what the documentation leaves undefined, and ends the process.
EXPORT void undefined(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

// ---- driver.c

EXPORT int cuDevicePrimaryCtxRetain(Context **context, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxPushCurrent_v2(Context *context);
EXPORT int cuCtxPopCurrent_v2(Context **context);
EXPORT Context *standin_current(void);
EXPORT int standin_devices(void);
// The context that a stream belongs to, if a call may be made on it: null, and the error in `error`.
EXPORT Stream *standin_stream(void *stream, int *error);

// ---- streams.c

Stream *stream_of(Context *context, int blocking);
// Puts something on a stream, behind what another holds up to a number; its own number.
EXPORT uint64_t enqueue(Stream *stream, int (*run)(void *), void *data, Stream *after, uint64_t after_number);
// All of a stream up to a number, and what that waits for.
void advance(Stream *stream, uint64_t number);
int finished(const Stream *stream, uint64_t number);
// A synchronisation: what the other streams do in the meantime may come first.
void wait_for(Stream *stream, uint64_t number);
// One thing of a stream: time goes by.
void step(Stream *stream);
void advance_all(Context *context);
uint64_t last_number(void);

// ---- events.c

// A call that may wait or allocate.
void standin_unsafe(const char *call);

// ---- memory.c

int memory_take(int device, uint64_t bytes, int pooled, uint64_t *address);
Allocation *memory_at(uint64_t address);
// The range lies in one live allocation of this device.
EXPORT int memory_holds(int device, uint64_t address, uint64_t bytes);
// The address is one of device memory, live or not.
int memory_is_device(uint64_t address);
void memory_forget(Allocation *allocation);
void memory_give_back(Allocation *allocation);
void memory_info(int device, uint64_t *free, uint64_t *total);
// What was freed leaves the pool: at a synchronisation, where no threshold holds it.
void memory_trim(int device);
uint64_t *memory_counter(int device, int attribute);
void *pinned_take(uint64_t bytes);
int pinned_give_back(void *address);
int pinned_holds(const void *address, uint64_t bytes);

#endif
