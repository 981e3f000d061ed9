/* sys/resource.h: empty, as what the tests limit is not limited there. */
