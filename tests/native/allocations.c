/* LD_PRELOAD: counts blocks of at least a given size, whoever allocates them and by whatever library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

static atomic_size_t threshold = (size_t)-1;
static atomic_long count;
static atomic_size_t largest;

static void note(size_t size) {
  if (size < atomic_load(&threshold)) return;
  atomic_fetch_add(&count, 1);
  size_t before = atomic_load(&largest);
  while (size > before && !atomic_compare_exchange_weak(&largest, &before, size)) {
  }
}

void allocations_watch(size_t at_least) {
  atomic_store(&count, 0);
  atomic_store(&largest, 0);
  atomic_store(&threshold, at_least);
}
long allocations_count(void) { return atomic_load(&count); }
size_t allocations_largest(void) { return atomic_load(&largest); }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

extern void *__libc_malloc(size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_memalign(size_t, size_t);

void *malloc(size_t size) {
  note(size);
  return __libc_malloc(size);
}
void *calloc(size_t n, size_t size) {
  note(n * size);
  return __libc_calloc(n, size);
}
void *realloc(void *old, size_t size) {
  note(size);
  return __libc_realloc(old, size);
}
void *memalign(size_t alignment, size_t size) {
  note(size);
  return __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void **out, size_t alignment, size_t size) {
  void *block = memalign(alignment, size);
  if (!block) return ENOMEM;
  *out = block;
  return 0;
}
void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  if (flags & MAP_ANONYMOUS) note(size);
  static __typeof__(&mmap) next;
  if (!next) next = NEXT(mmap);
  return next(address, size, protection, flags, file, offset);
}
