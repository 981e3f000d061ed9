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
    "LLAMA_KVCACHE",
    "LLAMA_KVCACHE_TYPE_K",
    "LLAMA_KVCACHE_TYPE_V",
    "LLAMA_KVCACHE_SELECT",
    "LLAMA_KVCACHE_PROMPTS",
    "LLAMA_KVCACHE_PREFIX",
    "LLAMA_KVCACHE_VALKEY_USER",
    "LLAMA_KVCACHE_VALKEY_PASSWORD",
    "LLAMA_ARG_KVCACHE",
    "LLAMA_ARG_KVCACHE_TYPE_K",
    "LLAMA_ARG_KVCACHE_TYPE_V",
    "LLAMA_ARG_KVCACHE_SELECT",
    "LLAMA_ARG_KVCACHE_PROMPTS",
    "LLAMA_ARG_KVCACHE_PREFIX",
    "LLAMA_ARG_NO_KVCACHE",
};

// llama.cpp has variables of its own that begin with LLAMA_KV and LLAMA_ARG_KV
static const char *const BEGINNINGS[] = {"LLAMA_KVC", "LLAMA_ARG_KVC", "LLAMA_ARG_NO_KVC"};

std::string llama_kvcache_variable(const char *name) {
    std::string option = std::string("--") + (name + strlen("LLAMA_"));

    for (char &c : option) {
        c = c == '_' ? '-' : (char)std::tolower((unsigned char)c);
    }

    return std::string(name) + " (" + option + ")";
}

static bool begins_with(const std::string &name, const char *beginning) { return name.rfind(beginning, 0) == 0; }

static void warn_of_unknown_variables(const char *beginning) {
    std::string known;

    for (const char *name : KNOWN) {
        if (begins_with(name, beginning)) {
            known += (known.empty() ? "" : ", ") + std::string(name);
        }
    }

    for (char **variable = environ; variable && *variable; ++variable) {
        const std::string name(*variable, strcspn(*variable, "="));

        if (begins_with(name, beginning) && std::find(std::begin(KNOWN), std::end(KNOWN), name) == std::end(KNOWN)) {
            LLAMA_LOG_WARN("llama_kvcache: nothing reads the variable %s: there are %s\n", name.c_str(), known.c_str());
        }
    }
}

void llama_kvcache_warn_of_unknown_variables() {
    static std::once_flag once;

    std::call_once(once, [] {
        for (const char *beginning : BEGINNINGS) {
            warn_of_unknown_variables(beginning);
        }
    });
}
