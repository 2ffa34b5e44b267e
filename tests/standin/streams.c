// Streams: what is put on one waits until somebody waits for it.
//
// | BACKTAPE_STANDIN_ORDER | what runs, and when |
// |---|---|
// | needed (the default) | what a synchronisation waits for and nothing else, as late as it may |
// | others | before that, all of the other streams as far as they come |
// | early | everything as soon as it may |
//
// The legacy default stream waits for the blocking streams of its context, and they for it (CUDA
// driver API, "Stream synchronization behavior").

#include "standin.h"

#include <stdlib.h>
#include <string.h>

static uint64_t numbers;

uint64_t last_number(void) { return numbers; }

static int is_order(const char *name) {
    const char *order = getenv("BACKTAPE_STANDIN_ORDER");
    return order && !strcmp(order, name);
}

Stream *stream_of(Context *context, int blocking) {
    Stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->blocking = blocking;
    // Behind the legacy default stream, which is the first.
    Stream **at = &context->streams;
    while (*at) at = &(*at)->next;
    *at = stream;
    return stream;
}

int finished(const Stream *stream, uint64_t number) {
    return !stream->first || stream->first->number > number;
}

static int is_legacy(const Stream *stream) { return stream == stream->context->streams; }

// What the first of a stream waits for.
static int may_run(const Stream *stream) {
    const Op *op = stream->first;
    if (op->after && !finished(op->after, op->after_number)) return 0;
    if (!is_legacy(stream))
        return !stream->blocking || finished(stream->context->streams, op->number);
    for (Stream *other = stream->next; other; other = other->next)
        if (other->blocking && !finished(other, op->number)) return 0;
    return 1;
}

static void run_first(Stream *stream) {
    Op *op = stream->first;
    if (op->after) advance(op->after, op->after_number);
    if (is_legacy(stream)) {
        for (Stream *other = stream->next; other; other = other->next)
            if (other->blocking) advance(other, op->number);
    } else if (stream->blocking) {
        advance(stream->context->streams, op->number);
    }
    stream->first = op->next;
    if (!stream->first) stream->last = NULL;
    // A dead context does nothing any more.
    if (op->run && !stream->context->dead) stream->context->dead = op->run(op->data);
    free(op->data);
    free(op);
}

// All streams as far as they come without `but`.
static void run_others(Context *context, const Stream *but) {
    for (int ran = 1; ran;) {
        ran = 0;
        for (Stream *stream = context->streams; stream; stream = stream->next)
            while (stream != but && stream->first && may_run(stream)) run_first(stream), ran = 1;
    }
}

void advance(Stream *stream, uint64_t number) {
    while (!finished(stream, number)) run_first(stream);
}

void step(Stream *stream) {
    if (stream->first) run_first(stream);
}

void advance_all(Context *context) {
    for (Stream *stream = context->streams; stream; stream = stream->next) advance(stream, numbers);
}

uint64_t enqueue(Stream *stream, int (*run)(void *), void *data, Stream *after, uint64_t after_number) {
    Op *op = calloc(1, sizeof *op);
    uint64_t number = ++numbers;
    *op = (Op){NULL, number, after, after_number, run, data};
    if (stream->last) stream->last->next = op; else stream->first = op;
    stream->last = op;
    if (is_order("early")) run_others(stream->context, NULL);
    return number;
}

// A synchronisation: what others do in the meantime comes first.
void wait_for(Stream *stream, uint64_t number) {
    if (is_order("others")) run_others(stream->context, stream);
    advance(stream, number);
}
