// Memory of the devices: memory of this process, each allocation between pages that nobody may touch.
//
// Fresh memory holds NaN in every float. What is freed is never given out again: its pages may not
// be touched any more, so that who uses it is caught.

#define _GNU_SOURCE
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ARENA (64ull << 30)
#define PAGE 4096ull
// What cuMemAlloc aligns to in practice.
#define ALIGNMENT 256ull
#define EDGE 0xfb

static char *arena;
static uint64_t arena_used;
static Allocation *live;

// A device's pool, by the numbers of CUmemPool_attribute.
enum { RELEASE_THRESHOLD = 4, RESERVED = 5, RESERVED_HIGH = 6, USED = 7, USED_HIGH = 8, ATTRIBUTES = 9 };
static uint64_t pools[MOST_DEVICES][ATTRIBUTES];
// Taken outside of the pool.
static uint64_t plain[MOST_DEVICES];

static struct Pinned { struct Pinned *next; char *address; uint64_t bytes; } *pinned;

static uint64_t total(void) {
    const char *bytes = getenv("BACKTAPE_STANDIN_BYTES");
    return bytes ? strtoull(bytes, NULL, 10) : 1ull << 30;
}

uint64_t *memory_counter(int device, int attribute) {
    int known = attribute >= RELEASE_THRESHOLD && attribute < ATTRIBUTES;
    return known ? &pools[device][attribute] : NULL;
}

static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }

void memory_trim(int device) {
    uint64_t *pool = pools[device];
    uint64_t threshold = pool[RELEASE_THRESHOLD];
    pool[RESERVED] = most(pool[USED], threshold < pool[RESERVED] ? threshold : pool[RESERVED]);
}

void memory_info(int device, uint64_t *free, uint64_t *all) {
    *all = total();
    *free = *all - plain[device] - pools[device][RESERVED];
}

int memory_take(int device, uint64_t bytes, int pooled, uint64_t *address) {
    if (!arena) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena = mmap(NULL, ARENA, PROT_NONE, flags, -1, 0);
        if (arena == MAP_FAILED) undefined("no address space for the stand-in's memory");
    }
    uint64_t *pool = pools[device];
    uint64_t padded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    uint64_t length = (padded + PAGE - 1) / PAGE * PAGE;
    if (plain[device] + pool[USED] + bytes > total() || bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
    if (arena_used + length + 2 * PAGE > ARENA) undefined("the stand-in's memory was allocated too often");
    Allocation *taken = calloc(1, sizeof *taken);
    taken->pages = arena + arena_used + PAGE;
    taken->length = length;
    arena_used += length + PAGE;
    mprotect(taken->pages, length, PROT_READ | PROT_WRITE);
    memset(taken->pages, EDGE, length);
    taken->address = (uint64_t)taken->pages + length - padded;
    taken->bytes = bytes;
    memset((char *)taken->address, 0xff, bytes);
    taken->device = device;
    taken->pooled = pooled;
    taken->next = live;
    live = taken;
    if (pooled) {
        pool[USED] += bytes;
        pool[USED_HIGH] = most(pool[USED_HIGH], pool[USED]);
        pool[RESERVED] = most(pool[RESERVED], pool[USED]);
        pool[RESERVED_HIGH] = most(pool[RESERVED_HIGH], pool[RESERVED]);
    } else {
        plain[device] += bytes;
    }
    *address = taken->address;
    return CUDA_SUCCESS;
}

Allocation *memory_at(uint64_t address) {
    for (Allocation *one = live; one; one = one->next)
        if (address >= one->address && address <= one->address + one->bytes) return one;
    return NULL;
}

int memory_holds(int device, uint64_t address, uint64_t bytes) {
    Allocation *one = memory_at(address);
    return one && one->device == device && bytes <= one->address + one->bytes - address;
}

int memory_is_device(uint64_t address) {
    return arena && address >= (uint64_t)arena && address < (uint64_t)arena + ARENA;
}

// From now on nobody may be told of it.
void memory_forget(Allocation *allocation) {
    for (Allocation **at = &live; *at; at = &(*at)->next) {
        if (*at != allocation) continue;
        *at = allocation->next;
        break;
    }
    if (allocation->pooled) pools[allocation->device][USED] -= allocation->bytes;
    else plain[allocation->device] -= allocation->bytes;
}

// Its pages may not be touched any more.
void memory_give_back(Allocation *allocation) {
    const unsigned char *end = (unsigned char *)allocation->pages + allocation->length;
    for (const unsigned char *at = (unsigned char *)allocation->pages; at < end; at++) {
        if ((uint64_t)at == allocation->address) at += allocation->bytes;
        if (at < end && *at != EDGE)
            undefined("a write around an allocation of %llu bytes, %lld from its begin",
                      (unsigned long long)allocation->bytes, (long long)((uint64_t)at - allocation->address));
    }
    madvise(allocation->pages, allocation->length, MADV_DONTNEED);
    mprotect(allocation->pages, allocation->length, PROT_NONE);
    free(allocation);
}

void *pinned_take(uint64_t bytes) {
    struct Pinned *taken = calloc(1, sizeof *taken);
    taken->bytes = bytes;
    taken->address = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    memset(taken->address, 0xff, bytes);
    taken->next = pinned;
    pinned = taken;
    return taken->address;
}

int pinned_give_back(void *address) {
    for (struct Pinned **at = &pinned; *at; at = &(*at)->next) {
        struct Pinned *one = *at;
        if (one->address != address) continue;
        *at = one->next;
        free(one->address);
        free(one);
        return 1;
    }
    return 0;
}

int pinned_holds(const void *address, uint64_t bytes) {
    for (struct Pinned *one = pinned; one; one = one->next)
        if ((char *)address >= one->address && (char *)address + bytes <= one->address + one->bytes) return 1;
    return 0;
}
