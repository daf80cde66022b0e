/* Loops on several threads, with OpenMP where the compiler has it. */

#ifndef MOEFOLD_PARALLEL_H
#define MOEFOLD_PARALLEL_H

/* Elements below which threads cost more than they save, as in torch. */
#define MIN_PARALLEL_ELEMENTS 32768

#ifdef _OPENMP
#include <omp.h>
#define PRAGMA(X) _Pragma(#X)
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define PRAGMA(X)
#define THREAD 0
#define THREADS 1
#endif

/* Split a loop among `threads` threads if it is large enough. */
#define PARALLEL_FOR(IS_LARGE)    \
  (void)(IS_LARGE), (void)threads; \
  PRAGMA(omp parallel for schedule(static) if (IS_LARGE) num_threads(threads))

#endif
