/* Units are distributed dynamically, because other work may use one of the processors. A thread that cannot be started (a limit of
 * processes or of memory) is left out: OpenMP's runtime would end the process. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

enum { STACK_BYTES = 2 << 20 };

static atomic_int chosen_threads;
static int default_threads = 1;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int workers; /* started */
    int places;  /* for workers that have not joined the job yet */
    int active;  /* workers in the job */
    unit_function run;
    void *job;
    size_t units;
    atomic_size_t next;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .begin = PTHREAD_COND_INITIALIZER, .end = PTHREAD_COND_INITIALIZER};

static atomic_flag busy = ATOMIC_FLAG_INIT; /* a job has the workers */

static void run_share(int worker)
{
    for (size_t unit; (unit = atomic_fetch_add(&pool.next, 1)) < pool.units;)
        pool.run(pool.job, unit, worker);
}

static void *wait_for_jobs(void *unused)
{
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.places == 0)
            pthread_cond_wait(&pool.begin, &pool.lock);
        const int worker = pool.places--;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        run_share(worker);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0)
            pthread_cond_signal(&pool.end);
    }
    return unused;
}

/* Signals are for the threads of the program. */
static bool start_worker(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, &attributes, wait_for_jobs, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return failed == 0;
}

void run_units(size_t units, int threads, unit_function run, void *job)
{
    const int others = units < (size_t)threads ? (int)units - 1 : threads - 1;
    size_t alone = 0; /* units that are done here while another job has the workers */
    while (alone < units && (others <= 0 || atomic_flag_test_and_set(&busy)))
        run(job, alone++, 0);
    if (alone == units)
        return;
    pthread_mutex_lock(&pool.lock);
    while (pool.workers < others && start_worker())
        pool.workers++;
    pool.run = run;
    pool.job = job;
    pool.units = units;
    atomic_store(&pool.next, alone);
    pool.places = others;
    pthread_cond_broadcast(&pool.begin);
    pthread_mutex_unlock(&pool.lock);
    run_share(0);
    pthread_mutex_lock(&pool.lock);
    pool.places = 0;
    while (pool.active > 0)
        pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    atomic_flag_clear(&busy);
}

/* A forked child has none of its parent's workers, and perhaps a lock that one of them held. */
static void forget_workers(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.begin, NULL);
    pthread_cond_init(&pool.end, NULL);
    pool.workers = pool.places = pool.active = 0;
    atomic_flag_clear(&busy);
}

__attribute__((constructor)) static void prepare(void)
{
    const char *setting = getenv("OMP_NUM_THREADS");
    long count = setting ? strtol(setting, NULL, 10) : 0;
    cpu_set_t usable;
    if (count <= 0)
        count = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : sysconf(_SC_NPROCESSORS_ONLN);
    default_threads = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : (int)count;
    pthread_atfork(NULL, NULL, forget_workers);
}

void threads_set(int count)
{
    atomic_store(&chosen_threads, count);
}

int threads_get(void)
{
    const int count = atomic_load(&chosen_threads);
    return count > 0 ? count : default_threads;
}
