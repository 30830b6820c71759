// device.c: choosing the instruction set, the device's life, the measured roofs.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <sched.h>
#include <unistd.h>
#include "internal.h"

// The revision rises whenever any op may give other bits than before.
static const char arithmetic_id[] = "cpu-fma32/1";

static const rk_isa *choose(const char *name) {
  int any = !strcmp(name, "auto");
#if defined(__x86_64__)
  __builtin_cpu_init();
  if ((any || !strcmp(name, "avx512")) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return &rk_isa_avx512;
  if ((any || !strcmp(name, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &rk_isa_avx2;
#elif defined(__aarch64__)
  if (!strcmp(name, "neon")) return &rk_isa_portable;   // the compiler's NEON code of the portable bodies
#endif
  if (any || !strcmp(name, "portable")) return &rk_isa_portable;
  return NULL;
}

static int cores(void) {
#ifdef __linux__
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int)n : 1;
}

// (1+2^-12)^2 - (1+2^-11) is 2^-24 exactly when fused and 0 when the product is rounded first.
static int contracts(const rk_isa *isa) {
  volatile const float abc[3] = {1 + 0x1p-12f, 1 + 0x1p-12f, -(1 + 0x1p-11f)};
  return isa->contracts(abc);
}

rk_device *rk_device_open(const char *isa_name, int threads, char *err, size_t err_len) {
  char none[1];
  if (!err || !err_len) err = none, err_len = sizeof none;
  const rk_isa *isa = choose(isa_name ? isa_name : "auto");
  if (!isa) return snprintf(err, err_len, "this machine cannot run instruction set \"%s\"", isa_name), NULL;
  if (threads == 0) threads = rk_min(cores(), RK_THREADS_MAX);
  if (threads < 0 || threads > RK_THREADS_MAX) return snprintf(err, err_len, "%d threads, want 0 to %d", threads, RK_THREADS_MAX), NULL;
  if (contracts(isa)) return snprintf(err, err_len, "built with floating-point contraction: results would depend on the compiler"), NULL;
  rk_device *d = calloc(1, sizeof *d);
  if (d) d->pool = rk_pool_new(threads);
  if (!d || !d->pool) {
    free(d);
    return snprintf(err, err_len, "cannot start %d threads", threads), NULL;
  }
  atomic_init(&d->refs, 1);
  atomic_init(&d->closed, 0);
  d->threads = threads, d->isa = isa;
  pthread_mutex_init(&d->lock, NULL);
  return d;
}

void rk_device_retain(rk_device *d) { atomic_fetch_add(&d->refs, 1); }

void rk_device_drop(rk_device *d) {
  if (atomic_fetch_sub(&d->refs, 1) != 1) return;
  rk_pool_free(d->pool);
  pthread_mutex_destroy(&d->lock);
  free(d);
}

void rk_device_close(rk_device *d) {
  if (!d || atomic_exchange(&d->closed, 1)) return;
  rk_device_drop(d);
}

const char *rk_device_isa(const rk_device *d) { return d ? d->isa->name : ""; }
int rk_device_threads(const rk_device *d) { return d ? d->threads : 0; }
const char *rk_device_arithmetic(const rk_device *d) { return d ? arithmetic_id : ""; }

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { READ_CHUNK = 1 << 20, FMA_TASKS_PER_THREAD = 4 };

typedef struct {
  rk_device *dev;
  const uint8_t *data;
  size_t bytes;
  int tasks, opened;
  uint64_t rounds;
  _Atomic uint64_t sink;     // keeps the reads alive
} probe;

static int probe_advance(void *ctx) {
  probe *b = ctx;
  return b->opened++ ? 0 : b->tasks;
}

static void read_task(void *ctx, int i, int worker) {
  probe *b = ctx;
  (void)worker;
  size_t at = (size_t)i * READ_CHUNK, n = b->bytes - at < READ_CHUNK ? b->bytes - at : READ_CHUNK;
  atomic_fetch_xor(&b->sink, b->dev->isa->read(b->data + at, n));
}

static void fma_task(void *ctx, int i, int worker) {
  probe *b = ctx;
  (void)i, (void)worker;
  double v = b->dev->isa->fma(b->rounds);
  if (v == 1) atomic_fetch_xor(&b->sink, 1);
}

// Best rate of repeated passes for about `seconds`.
static double best_rate(probe *b, void (*task)(void *, int, int), double amount, double seconds) {
  double best = 0, stop = now() + seconds;
  rk_job job = {probe_advance, task, b};
  do {
    b->opened = 0;
    double t = now();
    rk_pool_run(b->dev->pool, &job);
    t = now() - t;
    if (t > 0 && amount / t > best) best = amount / t;
  } while (now() < stop);
  return best;
}

double rk_device_measure_read(rk_device *d, size_t bytes, double seconds) {
  if (!d || bytes < READ_CHUNK || bytes / READ_CHUNK >= RK_TASKS_MAX) return 0;
  uint8_t *data = rk_alloc(bytes);
  if (!data) return 0;
  memset(data, 1, bytes);    // a page that was never written is one shared zero page
  probe b = {.dev = d, .data = data, .bytes = bytes, .tasks = (int)((bytes + READ_CHUNK - 1) / READ_CHUNK)};
  double rate = best_rate(&b, read_task, (double)bytes, seconds);
  rk_release(data, bytes);
  return rate;
}

double rk_device_measure_fma(rk_device *d, double seconds) {
  if (!d) return 0;
  probe b = {.dev = d, .tasks = d->threads * FMA_TASKS_PER_THREAD, .rounds = 1 << 10};
  return best_rate(&b, fma_task, d->isa->fma_count * (double)b.rounds * b.tasks, seconds);
}
