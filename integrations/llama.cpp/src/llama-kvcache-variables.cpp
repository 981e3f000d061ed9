#include "llama-kvcache-variables.h"

#include "llama-impl.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <mutex>

#ifdef _WIN32
#define environ _environ
#else
extern char **environ;
#endif

static const char *const KNOWN[] = {
    "LLAMA_KVCACHE",         "LLAMA_KVCACHE_TYPE_K", "LLAMA_KVCACHE_TYPE_V",      "LLAMA_KVCACHE_SELECT",
    "LLAMA_KVCACHE_PROMPTS", "LLAMA_KVCACHE_PREFIX", "LLAMA_KVCACHE_VALKEY_USER", "LLAMA_KVCACHE_VALKEY_PASSWORD",
};

static const char *const BEGINNING = "LLAMA_KVC"; // llama.cpp has variables of its own that begin with LLAMA_KV

std::string llama_kvcache_variable(const char *name) {
    std::string option = std::string("--") + (name + strlen("LLAMA_"));

    for (char &c : option) {
        c = c == '_' ? '-' : (char)std::tolower((unsigned char)c);
    }

    return std::string(name) + " (" + option + ")";
}

static void warn_of_unknown_variables() {
    std::string known;

    for (const char *name : KNOWN) {
        known += (known.empty() ? "" : ", ") + std::string(name);
    }

    for (char **variable = environ; variable && *variable; ++variable) {
        const std::string name(*variable, strcspn(*variable, "="));

        if (name.rfind(BEGINNING, 0) == 0 && std::find(std::begin(KNOWN), std::end(KNOWN), name) == std::end(KNOWN)) {
            LLAMA_LOG_WARN("llama_kvcache: nothing reads the variable %s: there are %s\n", name.c_str(), known.c_str());
        }
    }
}

void llama_kvcache_warn_of_unknown_variables() {
    static std::once_flag once;

    std::call_once(once, warn_of_unknown_variables);
}
