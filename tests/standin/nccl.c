// The stand-in of libnccl: sends and receives between the devices of one process.
//
// A send and its receive meet: what comes after either on its stream comes after both. What is not
// met by the end of its group would wait for ever, and ends the process here.

#include "standin.h"

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

typedef struct Group { int ranks; struct Comm *comms[MOST_DEVICES]; } Group;
typedef struct Comm { Group *group; int rank, device; } Comm;

typedef struct {
    Comm *comm;
    int peer, type, sends;
    char *buffer;
    uint64_t count;
    Stream *stream;
} Transfer;

#define MOST_TRANSFERS 64
static __thread Transfer waiting[MOST_TRANSFERS];
// What went wrong in the group: nothing of it travels then, and its end says so.
static __thread int count, depth, group_error;

EXPORT int ncclGetVersion(int *version) {
    CALL("ncclGetVersion");
    *version = 22803;
    done(SUCCESS);
}

EXPORT int ncclCommInitAll(Comm **comms, int devices, const int *list) {
    CALL("ncclCommInitAll");
    int known = standin_devices();
    if (!comms || devices < 1 || devices > known) done(refuse(INVALID_ARGUMENT, "NCCL of %d devices", devices));
    Group *group = calloc(1, sizeof *group);
    group->ranks = devices;
    for (int rank = 0; rank < devices; rank++) {
        int device = list ? list[rank] : rank;
        if (device < 0 || device >= known) done(refuse(INVALID_ARGUMENT, "NCCL of device %d", device));
        for (int before = 0; before < rank; before++)
            if (group->comms[before]->device == device) done(refuse(INVALID_USAGE, "device %d twice", device));
        Comm *comm = calloc(1, sizeof *comm);
        *comm = (Comm){group, rank, device};
        comms[rank] = group->comms[rank] = comm;
    }
    done(SUCCESS);
}

static int ended(Comm *comm) {
    if (!comm || !comm->group) return refuse(INVALID_ARGUMENT, "a communicator ends twice");
    comm->group->comms[comm->rank] = NULL;
    comm->group = NULL;
    return SUCCESS;
}

EXPORT int ncclCommDestroy(Comm *comm) {
    CALL("ncclCommDestroy");
    done(ended(comm));
}

EXPORT int ncclCommAbort(Comm *comm) {
    CALL("ncclCommAbort");
    done(ended(comm));
}

static int meet(const Transfer *send, const Transfer *receive);

static int end_group(void) {
    int met[MOST_TRANSFERS] = {0}, error = group_error;
    if (error) {
        count = group_error = 0;
        return error;
    }
    for (int i = 0; i < count; i++) {
        if (!waiting[i].sends) continue;
        for (int j = 0; j < count && !met[i]; j++) {
            const Transfer *send = &waiting[i], *receive = &waiting[j];
            int pair = !met[j] && !receive->sends && send->comm->group == receive->comm->group
                && send->peer == receive->comm->rank && receive->peer == send->comm->rank;
            if (!pair) continue;
            met[i] = met[j] = 1;
            if (!error) error = meet(send, receive);
        }
    }
    int all = count;
    count = group_error = 0;
    for (int i = 0; i < all; i++)
        if (!met[i]) undefined("a %s of NCCL would wait for ever", waiting[i].sends ? "send" : "receive");
    return error;
}

EXPORT int ncclGroupStart(void) {
    CALL("ncclGroupStart");
    depth++;
    done(SUCCESS);
}

EXPORT int ncclGroupEnd(void) {
    int error = standin_enter("ncclGroupEnd");
    if (error) {
        // It has ended all the same.
        group_error = error;
        depth--;
        done(end_group());
    }
    if (!depth) done(refuse(INVALID_USAGE, "a group of NCCL ends that was not begun"));
    done(--depth ? SUCCESS : end_group());
}

// NCCL makes the communicator's device current itself, so the null stream is that device's.
static int post(Comm *comm, int peer, int type, int sends, char *buffer, uint64_t elements, void *handle) {
    if (!comm || !comm->group || peer < 0 || peer >= comm->group->ranks)
        return refuse(INVALID_ARGUMENT, "NCCL with peer %d", peer);
    Context *of = NULL;
    int error;
    if (cuDevicePrimaryCtxRetain(&of, comm->device)) return UNHANDLED_CUDA_ERROR;
    cuCtxPushCurrent_v2(of);
    Stream *stream = standin_stream(handle, &error);
    cuCtxPopCurrent_v2(&of);
    cuDevicePrimaryCtxRelease_v2(comm->device);
    if (!stream) return UNHANDLED_CUDA_ERROR;
    uint64_t bytes = elements * (type == 8 || type == 4 || type == 5 ? 8 : type <= 1 ? 1 : type == 6 ? 2 : 4);
    if (!memory_holds(comm->device, (uint64_t)buffer, bytes))
        undefined("a buffer of NCCL's is not %llu bytes of device %d", (unsigned long long)bytes, comm->device);
    if (count == MOST_TRANSFERS) undefined("more transfers than the stand-in holds");
    waiting[count++] = (Transfer){comm, peer, type, sends, buffer, bytes, stream};
    return depth ? SUCCESS : end_group();
}

EXPORT int ncclSend(const void *buffer, uint64_t elements, int type, int peer, Comm *comm, void *stream) {
    int error = standin_enter("ncclSend");
    if (!error) error = post(comm, peer, type, 1, (char *)buffer, elements, stream);
    if (error && depth) group_error = error;
    done(error);
}

EXPORT int ncclRecv(void *buffer, uint64_t elements, int type, int peer, Comm *comm, void *stream) {
    int error = standin_enter("ncclRecv");
    if (!error) error = post(comm, peer, type, 0, buffer, elements, stream);
    if (error && depth) group_error = error;
    done(error);
}

typedef struct { char *to; const char *from; uint64_t bytes; } Carried;

static int carry(void *data) {
    Carried *carried = data;
    memmove(carried->to, carried->from, carried->bytes);
    return CUDA_SUCCESS;
}

static int meet(const Transfer *send, const Transfer *receive) {
    if (send->count != receive->count || send->type != receive->type)
        return refuse(INVALID_USAGE, "a send and its receive differ in size");
    Carried *data = malloc(sizeof *data);
    *data = (Carried){receive->buffer, send->buffer, send->count};
    uint64_t sent = enqueue(send->stream, NULL, NULL, NULL, 0);
    uint64_t done_at = enqueue(receive->stream, carry, data, send->stream, sent);
    if (send->stream != receive->stream) enqueue(send->stream, NULL, NULL, receive->stream, done_at);
    return SUCCESS;
}
