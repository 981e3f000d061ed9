#pragma once

#include <string>

// names a variable and its option, for messages: "LLAMA_KVCACHE_TYPE_K (--kvcache-type-k)"
std::string llama_kvcache_variable(const char *name);

// warns once of variables whose names begin as these, and that nothing reads
void llama_kvcache_warn_of_unknown_variables();
