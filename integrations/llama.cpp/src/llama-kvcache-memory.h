// The memory that is free on this machine.
#pragma once

#include <cstdint>

// Warns in the log if rows may take more bytes than are free: on the machine, or by the limit of a cgroup or of the
// process. Memory is taken as the cache fills, so that a context for which it does not suffice starts all the same.
void llama_kvcache_warn_of_memory(int64_t n_bytes);
