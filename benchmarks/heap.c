/* Counts what a process takes from the heap: live bytes now, and the most that ever were.
 *
 * Preloaded into Python, it sits under every allocation that is made through malloc and its
 * relatives: tensors, kernel scratch space, autograd nodes, large Python objects. Bytes are those
 * the allocator hands out (malloc_usable_size), which may be a few more than were asked for. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static atomic_long live, peak;

static void *taken(void *block) {
    if (block) {
        long size = (long)malloc_usable_size(block);
        long now = atomic_fetch_add(&live, size) + size, most = atomic_load(&peak);
        while (now > most && !atomic_compare_exchange_weak(&peak, &most, now)) {}
    }
    return block;
}

static void given_back(void *block) {
    if (block) atomic_fetch_sub(&live, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = memalign(alignment, size);
    return *block ? 0 : ENOMEM;
}

void *realloc(void *block, size_t size) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *moved = __libc_realloc(block, size);
    if (moved || !size) { /* otherwise it failed and the old block is still there */
        atomic_fetch_sub(&live, before);
        taken(moved);
    }
    return moved;
}

void free(void *block) {
    given_back(block);
    __libc_free(block);
}

long heap_live(void) { return atomic_load(&live); }
long heap_peak(void) { return atomic_load(&peak); }
void heap_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }
