// The stand-in of libcuda: streams and events as a program sees them.

#include "standin.h"

#include <stdlib.h>
#include <time.h>

// The mode of this thread: GLOBAL, THREAD_LOCAL, RELAXED.
static __thread int capture_mode;

// With BACKTAPE_STANDIN_CAPTURING=1 another thread captures a graph in global mode all the time: a
// call that may wait or allocate ends its capture, unless this thread is relaxed.
void standin_unsafe(const char *call) {
    const char *capturing = getenv("BACKTAPE_STANDIN_CAPTURING");
    if (capturing && atoi(capturing) && capture_mode != 2)
        undefined("%s ends another thread's capture of a graph", call);
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    CALL("cuThreadExchangeStreamCaptureMode");
    if (*mode < 0 || *mode > 2) done(refuse(CUDA_ERROR_INVALID_VALUE, "the capture mode %d", *mode));
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    done(CUDA_SUCCESS);
}

// What a synchronisation ends with.
static int synchronised(Context *context) {
    memory_trim(context->device);
    return context->dead;
}

EXPORT int cuCtxSynchronize(void) {
    CALL("cuCtxSynchronize");
    standin_unsafe("cuCtxSynchronize");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    advance_all(standin_current());
    done(synchronised(standin_current()));
}

EXPORT int cuStreamCreate(Stream **to, unsigned flags) {
    CALL("cuStreamCreate");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (flags > 1) done(refuse(CUDA_ERROR_INVALID_VALUE, "cuStreamCreate with flags %u", flags));
    *to = stream_of(standin_current(), flags == 0);
    done(CUDA_SUCCESS);
}

// What is on it is done all the same.
EXPORT int cuStreamDestroy_v2(void *handle) {
    CALL("cuStreamDestroy");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    stream->destroyed = 1;
    done(CUDA_SUCCESS);
}

EXPORT int cuStreamSynchronize(void *handle) {
    CALL("cuStreamSynchronize");
    standin_unsafe("cuStreamSynchronize");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    wait_for(stream, last_number());
    done(synchronised(stream->context));
}

EXPORT int cuEventCreate(Event **to, unsigned flags) {
    CALL("cuEventCreate");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    // BLOCKING_SYNC, DISABLE_TIMING, and INTERPROCESS with the latter.
    if (flags > 7 || (flags & 4 && !(flags & 2)))
        done(refuse(CUDA_ERROR_INVALID_VALUE, "cuEventCreate with flags %u", flags));
    Event *event = calloc(1, sizeof *event);
    event->context = standin_current();
    event->flags = flags;
    *to = event;
    done(CUDA_SUCCESS);
}

// Handles stay: an event that is destroyed may still be on a stream.
EXPORT int cuEventDestroy_v2(Event *event) {
    CALL("cuEventDestroy");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (!event || !event->context) done(refuse(CUDA_ERROR_INVALID_HANDLE, "an event is destroyed twice"));
    event->context = NULL;
    done(CUDA_SUCCESS);
}

static int happen(void *data) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    (*(Event **)data)->at = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return CUDA_SUCCESS;
}

EXPORT int cuEventRecord(Event *event, void *handle) {
    CALL("cuEventRecord");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    if (!event || event->context != stream->context)
        done(refuse(CUDA_ERROR_INVALID_HANDLE, "an event of another context is recorded"));
    Event **data = malloc(sizeof *data);
    *data = event;
    event->stream = stream;
    event->recorded = 1;
    event->number = last_number() + 1;
    enqueue(stream, happen, data, NULL, 0);
    done(CUDA_SUCCESS);
}

// Of an event that was never recorded nothing is waited for.
EXPORT int cuStreamWaitEvent(void *handle, Event *event, unsigned flags) {
    CALL("cuStreamWaitEvent");
    int error;
    Stream *stream = standin_stream(handle, &error);
    if (!stream) done(error);
    if (!event || !event->context || flags) done(refuse(CUDA_ERROR_INVALID_HANDLE, "no event to be waited for"));
    if (!event->recorded) done(CUDA_SUCCESS);
    enqueue(stream, NULL, NULL, event->stream, event->number);
    done(CUDA_SUCCESS);
}

// Who asks again and again sees time go by: one thing of the stream is done for each "not ready".
EXPORT int cuEventQuery(Event *event) {
    CALL("cuEventQuery");
    standin_unsafe("cuEventQuery");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (!event || !event->context) done(refuse(CUDA_ERROR_INVALID_HANDLE, "no event to be asked for"));
    if (!event->recorded || finished(event->stream, event->number)) done(event->context->dead);
    step(event->stream);
    done(CUDA_ERROR_NOT_READY);
}

EXPORT int cuEventSynchronize(Event *event) {
    CALL("cuEventSynchronize");
    standin_unsafe("cuEventSynchronize");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (!event || !event->context) done(refuse(CUDA_ERROR_INVALID_HANDLE, "no event to be waited for"));
    if (event->recorded) wait_for(event->stream, event->number);
    done(synchronised(event->context));
}

EXPORT int cuEventElapsedTime_v2(float *milliseconds, Event *from, Event *to) {
    CALL("cuEventElapsedTime");
    int error;
    if (!standin_stream(NULL, &error)) done(error);
    if (!from->recorded || !to->recorded || from->flags & 2 || to->flags & 2)
        done(refuse(CUDA_ERROR_INVALID_HANDLE, "the time between events that were not recorded or have none"));
    if (!finished(from->stream, from->number) || !finished(to->stream, to->number)) done(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)(to->at - from->at);
    done(CUDA_SUCCESS);
}
