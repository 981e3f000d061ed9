/* environment.h: the variables of the environment. */
#ifndef KVC_ENVIRONMENT_H
#define KVC_ENVIRONMENT_H

/* Returns the value of a variable until the thread's next call, or NULL if it has none.  On Windows it is the
 * process's, in UTF-8, which a C library other than this one's may have set since the start; there an empty one is
 * none, and of one that is longer than any that the library knows it is the beginning. */
const char *kvc_environment(const char *name);

#endif
