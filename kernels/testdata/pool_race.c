// pool_race.c: the pool under the thread sanitizer (pool_test.go builds it). Stages of 0 to 200 tasks, two callers that
// compete for one pool, and pools that start and stop. Every task adds to plain memory of its stage: a task that runs
// twice, not at all, or beside another stage is a wrong sum or a race.
#include "../pool.c"
#include <stdio.h>

enum { STAGES = 40, TASKS = 200, RUNS = 60, THREADS = 5 };

typedef struct {
  int stage, tasks, seed;
  int hits[TASKS];
  long sum;          // written by advance alone
} job_state;

static int next_stage(void *ctx) {
  job_state *j = ctx;
  for (int i = 0; i < j->tasks; i++) {
    if (j->hits[i] != 1) return fprintf(stderr, "task %d ran %d times\n", i, j->hits[i]), exit(1), 0;
    j->hits[i] = 0, j->sum++;
  }
  if (j->stage++ == STAGES) return j->tasks = 0;
  return j->tasks = 1 + (j->stage * 37 + j->seed) % TASKS;
}

static void hit(void *ctx, int i, int worker) {
  job_state *j = ctx;
  if (worker < 0 || worker >= THREADS) exit(1);
  j->hits[i]++;
}

static void *caller(void *arg) {
  rk_pool *p = arg;
  for (int run = 0; run < RUNS; run++) {
    job_state j = {.seed = run};
    rk_job job = {next_stage, hit, &j};
    rk_pool_run(p, &job);
    if (j.stage != STAGES + 1 || j.tasks != 0) return fprintf(stderr, "the job ended early\n"), exit(1), NULL;
  }
  return NULL;
}

int main(void) {
  for (int round = 0; round < 3; round++) {
    rk_pool *p = rk_pool_new(THREADS);
    pthread_t other;
    if (!p || pthread_create(&other, NULL, caller, p)) return 1;
    caller(p);
    pthread_join(other, NULL);
    rk_pool_free(p);
  }
  return 0;
}
