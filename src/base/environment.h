/* environment.h: the variables of the environment. */
#ifndef KVC_ENVIRONMENT_H
#define KVC_ENVIRONMENT_H

/* Returns the value of a variable until the thread's next call, or NULL if it has none.  On Windows it is the
 * process's value, in UTF-8, which another C library may have set since the start.  There an empty variable counts
 * as unset, and a value longer than any that the library knows is cut. */
const char *kvc_environment(const char *name);

#endif
