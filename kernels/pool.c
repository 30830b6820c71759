// pool.c: the device and its worker pool.
//
// Invariants:
//   - The ticket word holds (generation, tasks, next). A thread claims with one fetch-add; a claim below `tasks` keeps
//     its stage alive until it is counted in `done`, so a late thread never sees another stage's tasks.
//   - The thread that counts the last task runs advance alone and publishes the next stage. Nobody waits for a thread
//     that has claimed nothing: on a busy machine the caller can finish a whole run by itself.
//   - Waiting threads spin for a short while, then sleep on a condition; a publisher wakes them only when some sleep.
#define _GNU_SOURCE
#include <stdlib.h>
#include "internal.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { SPINS = 2000, TASK_BITS = 20, TASK_MASK = (1 << TASK_BITS) - 1 };

struct rk_pool {
  _Alignas(64) _Atomic uint64_t ticket;
  _Alignas(64) atomic_int done;
  _Alignas(64) atomic_int sleepers;
  atomic_int stop;
  rk_job job;                // written by the publisher, read after a ticket
  int threads;
  pthread_mutex_t run;       // one job at a time
  pthread_mutex_t lock;      // for the condition
  pthread_cond_t wake;
  pthread_t thread[RK_THREADS_MAX];
};

typedef struct { rk_pool *pool; int worker; } worker_arg;

static inline void relax(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// IEEE denormals and round to nearest in every thread that computes.
static unsigned fp_enter(void) {
#if defined(__x86_64__)
  unsigned old = _mm_getcsr();
  _mm_setcsr(0x1f80);
  return old;
#elif defined(__aarch64__)
  uint64_t old, plain = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  __asm__ volatile("msr fpcr, %0" : : "r"(plain));
  return (unsigned)old;
#else
  return 0;
#endif
}

static void fp_leave(unsigned old) {
#if defined(__x86_64__)
  _mm_setcsr(old);
#elif defined(__aarch64__)
  uint64_t v = old;
  __asm__ volatile("msr fpcr, %0" : : "r"(v));
#else
  (void)old;
#endif
}

static uint64_t generation(uint64_t ticket) { return ticket >> (2 * TASK_BITS); }
static int tasks_of(uint64_t ticket) { return (int)(ticket >> TASK_BITS) & TASK_MASK; }

static void wake_all(rk_pool *p) {
  if (atomic_load(&p->sleepers) == 0) return;
  pthread_mutex_lock(&p->lock);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

// Opens the next stage of the job, or closes the job with a stage of no tasks. Called by one thread at a time.
static void publish(rk_pool *p, uint64_t gen) {
  int n = p->job.advance(p->job.ctx);
  if (n > RK_TASKS_MAX) n = RK_TASKS_MAX;   // the builders keep below; never let the ticket overflow
  atomic_store(&p->done, 0);
  atomic_store(&p->ticket, (gen + 1) << (2 * TASK_BITS) | (uint64_t)n << TASK_BITS);
  if (n != 1) wake_all(p);
}

// Claims and runs tasks until the open stage has none left; returns the ticket that ran dry.
static uint64_t work(rk_pool *p, int worker) {
  for (;;) {
    uint64_t t = atomic_fetch_add(&p->ticket, 1);
    int n = tasks_of(t), i = (int)t & TASK_MASK;
    if (i >= n) return t;
    p->job.task(p->job.ctx, i, worker);
    if (atomic_fetch_add(&p->done, 1) + 1 == n) publish(p, generation(t));
  }
}

// Waits until the ticket's generation differs from seen.
static void await(rk_pool *p, uint64_t seen) {
  for (int i = 0; i < SPINS; i++) {
    if (generation(atomic_load_explicit(&p->ticket, memory_order_acquire)) != seen) return;
    relax();
  }
  pthread_mutex_lock(&p->lock);
  atomic_fetch_add(&p->sleepers, 1);
  while (generation(atomic_load(&p->ticket)) == seen && !atomic_load(&p->stop)) pthread_cond_wait(&p->wake, &p->lock);
  atomic_fetch_sub(&p->sleepers, 1);
  pthread_mutex_unlock(&p->lock);
}

void rk_name_thread(const char *name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
  pthread_setname_np(name);
#else
  (void)name;
#endif
}

static void *worker_main(void *arg) {
  worker_arg a = *(worker_arg *)arg;
  free(arg);
  rk_name_thread("rk-worker");
  fp_enter();
  while (!atomic_load(&a.pool->stop)) await(a.pool, generation(work(a.pool, a.worker)));
  return NULL;
}

void rk_pool_run(rk_pool *p, const rk_job *job) {
  pthread_mutex_lock(&p->run);
  unsigned fp = fp_enter();
  p->job = *job;
  uint64_t start = generation(atomic_load(&p->ticket));
  publish(p, start);
  for (;;) {
    uint64_t t = work(p, 0);
    if (tasks_of(t) == 0 && generation(t) != start) break;   // closed; only the next run opens it again
    await(p, generation(t));
  }
  fp_leave(fp);
  pthread_mutex_unlock(&p->run);
}

rk_pool *rk_pool_new(int threads) {
  rk_pool *p = NULL;
  if (posix_memalign((void **)&p, 64, sizeof *p)) return NULL;
  memset(p, 0, sizeof *p);
  pthread_mutex_init(&p->run, NULL);
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->wake, NULL);
  p->threads = 1;
  for (int i = 1; i < threads; i++) {
    worker_arg *a = malloc(sizeof *a);
    if (a) *a = (worker_arg){p, i};
    if (!a || pthread_create(&p->thread[i], NULL, worker_main, a)) {
      free(a);
      rk_pool_free(p);
      return NULL;
    }
    p->threads = i + 1;
  }
  return p;
}

void rk_pool_free(rk_pool *p) {
  if (!p) return;
  pthread_mutex_lock(&p->lock);
  atomic_store(&p->stop, 1);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
  for (int i = 1; i < p->threads; i++) pthread_join(p->thread[i], NULL);
  pthread_mutex_destroy(&p->run);
  pthread_mutex_destroy(&p->lock);
  pthread_cond_destroy(&p->wake);
  free(p);
}
