/* Worker threads that are kept between jobs, and how many a job gets. */
#ifndef AQ_NVFP4_POOL_H
#define AQ_NVFP4_POOL_H

#include <stddef.h>

enum { MAX_THREADS = 1024 };

/* 0: OMP_NUM_THREADS, or else the number of processors that this process may use. */
void threads_set(int count);
int threads_get(void);

/* One unit of a job. worker: less than the job's number of threads, and not that of another unit at the same time. */
typedef void (*unit_function)(void *job, size_t unit, int worker);

/* Call `run` for the units 0 .. units - 1, in any order, in up to `threads` threads including this one, and return when all are done.
 * With fewer threads where the system starts no more, and in this thread alone while another job has the workers. */
void run_units(size_t units, int threads, unit_function run, void *job);

#endif
