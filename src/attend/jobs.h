/* jobs.h: joins units that share rows into jobs. */
#ifndef KVC_JOBS_H
#define KVC_JOBS_H

#include "attend/units.h"

/* Sorts the units of whole sequences by their rows, so that those with most in common stand side by side; the others
 * follow. */
void kvc_sort_units(kvc_maker *m);

/* All that are to be done, the largest first. */
void kvc_find_jobs(kvc_maker *m);

#endif
