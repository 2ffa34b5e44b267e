// The stand-in of libcuda: memory of the device, pinned memory, copies.
//
// To and from pinned memory a copy happens when its turn comes. From pageable memory it is staged
// before the call returns, to pageable memory it has happened then (CUDA driver API, "API
// synchronization behavior"). With BACKTAPE_STANDIN_LATE=1 the latter happens when it is waited for:
// later than documented, for who does not rely on it.

#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int late(void) {
    const char *late = getenv("BACKTAPE_STANDIN_LATE");
    return late && atoi(late);
}

EXPORT int cuMemGetInfo_v2(uint64_t *free, uint64_t *total) {
    CALL("cuMemGetInfo");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    memory_info(standin_current()->device, free, total);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemAlloc_v2(uint64_t *address, uint64_t bytes) {
    CALL("cuMemAlloc");
    standin_unsafe("cuMemAlloc");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (!bytes) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAlloc of no bytes"));
    done(memory_take(standin_current()->device, bytes, 0, address));
}

EXPORT int cuMemAllocAsync(uint64_t *address, uint64_t bytes, void *handle) {
    CALL("cuMemAllocAsync");
    int error;
    if (!standin_stream(handle, &error)) done(error);
    if (!bytes) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAllocAsync of no bytes"));
    done(memory_take(standin_current()->device, bytes, 1, address));
}

static Allocation *begin_of(uint64_t address) {
    Allocation *one = memory_at(address);
    return one && one->address == address ? one : NULL;
}

// Waits for all of the device, as the driver does.
EXPORT int cuMemFree_v2(uint64_t address) {
    CALL("cuMemFree");
    standin_unsafe("cuMemFree");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    Allocation *one = begin_of(address);
    if (!one) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFree of what is no live allocation"));
    if (one->device != standin_current()->device)
        done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFree with another device's context current"));
    advance_all(standin_current());
    memory_forget(one);
    memory_give_back(one);
    done(standin_current()->dead);
}

static int give_back(void *data) {
    memory_give_back(*(Allocation **)data);
    return CUDA_SUCCESS;
}

// Stricter than the documentation: another device's stream knows nothing of the work on this one's,
// so memory is freed on a stream of its own device.
EXPORT int cuMemFreeAsync(uint64_t address, void *handle) {
    CALL("cuMemFreeAsync");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    Allocation *one = begin_of(address);
    if (!one) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeAsync of what is no live allocation"));
    if (one->device != stream->context->device)
        undefined("memory of device %d is freed on a stream of device %d", one->device, stream->context->device);
    memory_forget(one);
    Allocation **data = malloc(sizeof *data);
    *data = one;
    enqueue(stream, give_back, data, NULL, 0);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemHostAlloc(void **address, uint64_t bytes, unsigned flags) {
    CALL("cuMemHostAlloc");
    standin_unsafe("cuMemHostAlloc");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    // PORTABLE, DEVICEMAP, WRITECOMBINED.
    if (!bytes || flags & ~7u) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuMemHostAlloc of %llu bytes, flags %u",
                                           (unsigned long long)bytes, flags));
    *address = pinned_take(bytes);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemFreeHost(void *address) {
    CALL("cuMemFreeHost");
    standin_unsafe("cuMemFreeHost");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    advance_all(standin_current());
    done(pinned_give_back(address) ? CUDA_SUCCESS
                                   : refuse(CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost of what is not pinned"));
}

typedef struct { char *to; const char *from; uint64_t bytes; int byte; char staged[]; } Copy;

static int copy(void *data) {
    Copy *copy = data;
    memmove(copy->to, copy->from ? copy->from : copy->staged, copy->bytes);
    return CUDA_SUCCESS;
}

static int set(void *data) {
    Copy *copy = data;
    memset(copy->to, copy->byte, copy->bytes);
    return CUDA_SUCCESS;
}

static Copy *copy_of(uint64_t to, const void *from, uint64_t bytes, uint64_t staged) {
    Copy *copy = malloc(sizeof *copy + staged);
    *copy = (Copy){(char *)to, from, bytes, 0};
    return copy;
}

static int out_of_range(const char *call, uint64_t address, uint64_t bytes) {
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s: no %llu bytes of this device's memory at %#llx", call,
                  (unsigned long long)bytes, (unsigned long long)address);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, uint64_t bytes, void *handle) {
    CALL("cuMemcpyHtoDAsync");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    if (!memory_holds(stream->context->device, to, bytes)) done(out_of_range("cuMemcpyHtoDAsync", to, bytes));
    int pinned = pinned_holds(from, bytes);
    Copy *data = copy_of(to, pinned ? from : NULL, bytes, pinned ? 0 : bytes);
    if (!pinned) memcpy(data->staged, from, bytes);
    enqueue(stream, copy, data, NULL, 0);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, uint64_t bytes, void *handle) {
    CALL("cuMemcpyDtoHAsync");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    if (!memory_holds(stream->context->device, from, bytes)) done(out_of_range("cuMemcpyDtoHAsync", from, bytes));
    uint64_t number = enqueue(stream, copy, copy_of((uint64_t)to, (void *)from, bytes, 0), NULL, 0);
    if (!pinned_holds(to, bytes) && !late()) wait_for(stream, number);
    done(stream->context->dead);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, uint64_t bytes, void *handle) {
    CALL("cuMemcpyDtoDAsync");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    int device = stream->context->device;
    if (!memory_holds(device, to, bytes)) done(out_of_range("cuMemcpyDtoDAsync", to, bytes));
    if (!memory_holds(device, from, bytes)) done(out_of_range("cuMemcpyDtoDAsync", from, bytes));
    enqueue(stream, copy, copy_of(to, (void *)from, bytes, 0), NULL, 0);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemsetD8Async(uint64_t to, unsigned char byte, uint64_t bytes, void *handle) {
    CALL("cuMemsetD8Async");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    if (!memory_holds(stream->context->device, to, bytes)) done(out_of_range("cuMemsetD8Async", to, bytes));
    Copy *data = copy_of(to, NULL, bytes, 0);
    data->byte = byte;
    enqueue(stream, set, data, NULL, 0);
    done(CUDA_SUCCESS);
}

// A pool's handle is its device's number, from 1.
EXPORT int cuDeviceGetMemPool(void **pool, int device) {
    CALL("cuDeviceGetMemPool");
    if (device < 0 || device >= standin_devices()) done(CUDA_ERROR_INVALID_DEVICE);
    *pool = (void *)(uintptr_t)(device + 1);
    done(CUDA_SUCCESS);
}

EXPORT int cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
    CALL("cuMemPoolGetAttribute");
    uint64_t *counter = memory_counter((int)(uintptr_t)pool - 1, attribute);
    if (!counter) done(refuse(CUDA_ERROR_INVALID_VALUE, "a pool has no number %d", attribute));
    *(uint64_t *)value = *counter;
    done(CUDA_SUCCESS);
}

// Of what a pool holds only the most may be set, and only to 0; the threshold to anything.
EXPORT int cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    CALL("cuMemPoolSetAttribute");
    uint64_t *counter = memory_counter((int)(uintptr_t)pool - 1, attribute);
    uint64_t wanted = *(uint64_t *)value;
    int settable = attribute == 4 || ((attribute == 6 || attribute == 8) && wanted == 0);
    if (!counter || !settable) done(refuse(CUDA_ERROR_INVALID_VALUE, "a pool's number %d is set", attribute));
    // From now on: what is held at this moment counts.
    *counter = attribute == 4 ? wanted : *memory_counter((int)(uintptr_t)pool - 1, attribute - 1);
    done(CUDA_SUCCESS);
}
