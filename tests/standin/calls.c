// What every call has in common: one lock, a count, and a failure where a test asks for one.

#include "standin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static struct { const char *name; long calls, fail_at; int error; } counts[128];
static int known;

static void begin(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &attributes);
}

static int find(const char *name) {
    for (int i = 0; i < known; i++)
        if (!strcmp(counts[i].name, name)) return i;
    if (known == 128) undefined("more functions than the stand-in counts");
    counts[known].name = strdup(name);
    return known++;
}

int standin_enter(const char *name) {
    pthread_once(&once, begin);
    pthread_mutex_lock(&lock);
    int at = find(name);
    counts[at].calls++;
    if (counts[at].fail_at && counts[at].calls == counts[at].fail_at) return counts[at].error;
    return 0;
}

int standin_leave(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

// For tests: call number `nth` from now on answers with this error; 0 for none.
EXPORT void standin_fail(const char *name, long nth, int error) {
    standin_enter("standin_fail");
    int at = find(name);
    counts[at].calls = 0;
    counts[at].fail_at = nth;
    counts[at].error = error;
    standin_leave(0);
}

// For tests: how often it was called since the last `standin_fail` of this name.
EXPORT long standin_calls(const char *name) {
    standin_enter("standin_calls");
    long calls = counts[find(name)].calls;
    standin_leave(0);
    return calls;
}

int refuse(int error, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "stand-in: refused: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    return error;
}

void undefined(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "stand-in: undefined: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}
