// memory.c: allocation, the error text, buffers.
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include "internal.h"

static _Thread_local char error_text[256];

rk_status rk_fail(rk_status st, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(error_text, sizeof error_text, fmt, ap);
  va_end(ap);
  return st;
}

const char *rk_last_error(void) { return error_text; }

enum { HUGE_PAGE = 2 << 20, ARENA_ALIGN = 64 << 10 };

#if defined(__SANITIZE_ADDRESS__)
// Under the address sanitizer blocks come from the heap, which has guard zones (and refuses huge ones loudly).
void *rk_alloc(size_t bytes) {
  void *p = NULL;
  size_t n = bytes ? bytes : 1;
  if (n > (size_t)1 << 40 || posix_memalign(&p, ARENA_ALIGN, n)) return NULL;
  return memset(p, 0, n);
}

void rk_release(void *p, size_t bytes) {
  (void)bytes;
  free(p);
}
#else
// Large blocks are mapped on a huge page boundary: a streamed weight otherwise misses the TLB every 4 KiB.
void *rk_alloc(size_t bytes) {
  if (bytes == 0) bytes = 1;
  if (bytes > SIZE_MAX / 2) return NULL;
  size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : ARENA_ALIGN;
  size_t want = rk_pad(bytes, 4096);
  uint8_t *p = mmap(NULL, want + align, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
  uint8_t *at = (uint8_t *)rk_pad((uintptr_t)p, align);
  if (at > p) munmap(p, (size_t)(at - p));
  size_t tail = (size_t)(p + want + align - (at + want));
  if (tail) munmap(at + want, tail);
#ifdef MADV_HUGEPAGE
  if (align == HUGE_PAGE) madvise(at, want, MADV_HUGEPAGE);
#endif
  return at;
}

void rk_release(void *p, size_t bytes) {
  if (p) munmap(p, rk_pad(bytes ? bytes : 1, 4096));
}

#endif

rk_buffer *rk_buffer_new(rk_device *d, size_t bytes) {
  if (!d) return rk_fail(RK_EINVAL, "buffer: device is null"), NULL;
  rk_buffer *b = calloc(1, sizeof *b);
  uint8_t *data = b ? rk_alloc(bytes) : NULL;
  if (!data) {
    free(b);
    rk_fail(RK_ENOMEM, "buffer: no memory for %zu bytes", bytes);
    return NULL;
  }
  atomic_init(&b->refs, 1);
  b->dev = d, b->bytes = bytes, b->mapped = bytes, b->data = data;
  rk_device_retain(d);
  return b;
}

void rk_buffer_retain(rk_buffer *b) { atomic_fetch_add(&b->refs, 1); }

void rk_buffer_free(rk_buffer *b) {
  if (!b || atomic_fetch_sub(&b->refs, 1) != 1) return;
  rk_release(b->data, b->mapped);
  rk_device_drop(b->dev);
  free(b);
}

size_t rk_buffer_size(const rk_buffer *b) { return b ? b->bytes : 0; }

static int inside(const rk_buffer *b, size_t off, size_t n) { return b && off <= b->bytes && n <= b->bytes - off; }

rk_status rk_buffer_write(rk_buffer *b, size_t off, const void *src, size_t n) {
  if (!inside(b, off, n)) return rk_fail(RK_EINVAL, "buffer_write: [%zu, +%zu) outside %zu bytes", off, n, rk_buffer_size(b));
  if (n) memcpy(b->data + off, src, n);
  return RK_OK;
}

rk_status rk_buffer_read(const rk_buffer *b, size_t off, void *dst, size_t n) {
  if (!inside(b, off, n)) return rk_fail(RK_EINVAL, "buffer_read: [%zu, +%zu) outside %zu bytes", off, n, rk_buffer_size(b));
  if (n) memcpy(dst, b->data + off, n);
  return RK_OK;
}

void *rk_buffer_map(rk_buffer *b, size_t off, size_t n) { return inside(b, off, n) ? b->data + off : NULL; }

rk_status rk_buffer_copy(rk_buffer *dst, size_t dst_off, const rk_buffer *src, size_t src_off, size_t n) {
  if (!inside(dst, dst_off, n)) return rk_fail(RK_EINVAL, "buffer_copy: destination [%zu, +%zu) outside %zu bytes", dst_off, n, rk_buffer_size(dst));
  if (!inside(src, src_off, n)) return rk_fail(RK_EINVAL, "buffer_copy: source [%zu, +%zu) outside %zu bytes", src_off, n, rk_buffer_size(src));
  if (n) memmove(dst->data + dst_off, src->data + src_off, n);
  return RK_OK;
}
