// The memory that is free on this machine, where Linux says so.  kvcache/system.py counts the same way in Python.
#include "llama-kvcache-memory.h"

#include "llama-impl.h"

#include <algorithm>
#include <fstream>
#include <string>

// returns the first number in a file, or the number that follows a name in it; -1: there is none
static int64_t number_in(const std::string &path, const std::string &name = "") {
    std::ifstream file(path);
    std::string word;
    int64_t res;

    while (!name.empty() && file >> word && word != name) {
    }

    return file >> res ? res : -1;
}

// where a version of cgroups has what of a group
struct cgroup_files {
    const char *mount;
    const char *limit;
    const char *usage;
    const char *inactive; // in memory.stat: files in memory that the kernel can drop
};

static constexpr cgroup_files V1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                    "total_inactive_file"};
static constexpr cgroup_files V2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// returns the bytes that a cgroup, and those above it, leave; INT64_MAX: they have no limit
static int64_t left_by_cgroup(const cgroup_files &files, std::string path) {
    int64_t res = INT64_MAX;

    while (true) {
        const std::string folder = files.mount + path + "/";
        const int64_t limit = number_in(folder + files.limit); // "max" is no number
        const int64_t usage = number_in(folder + files.usage);

        if (limit >= 0 && usage >= 0) {
            const int64_t inactive = std::max<int64_t>(0, number_in(folder + "memory.stat", files.inactive));

            res = std::min(res, std::max<int64_t>(0, limit - usage + inactive));
        }
        if (path.empty()) {
            return res;
        }
        path.erase(path.rfind('/'));
    }
}

// returns the bytes of addresses that the process may still take (ulimit -v); INT64_MAX: there is no limit
static int64_t left_by_process() {
    const int64_t limit = number_in("/proc/self/limits", "space"); // of "Max address space"; "unlimited" is no number
    const int64_t usage = number_in("/proc/self/status", "VmSize:");

    return limit < 0 || usage < 0 ? INT64_MAX : std::max<int64_t>(0, limit - usage * 1024);
}

// Returns the bytes that are free, by the machine, the cgroups of the process and its own limit; INT64_MAX: nothing
// says how many.
static int64_t free_bytes() {
    const int64_t available = number_in("/proc/meminfo", "MemAvailable:");
    int64_t res = std::min(left_by_process(), available < 0 ? INT64_MAX : available * 1024);

    std::ifstream file("/proc/self/cgroup");
    std::string line;

    while (std::getline(file, line)) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);

        if (second == std::string::npos || line.compare(second, 2, ":/") != 0) {
            continue;
        }

        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool is_v2 = controllers == ",,";

        if (is_v2 || controllers.find(",memory,") != std::string::npos) {
            const std::string path = line.substr(second + 1);

            res = std::min(res, left_by_cgroup(is_v2 ? V2 : V1, path == "/" ? "" : path));
        }
    }

    return res;
}

void llama_kvcache_warn_of_memory(int64_t n_bytes) {
    static constexpr double MIB = 1024.0 * 1024.0;
    const int64_t n_free = free_bytes();

    if (n_bytes > n_free) {
        LLAMA_LOG_WARN("%s: keys and values may take %.2f MiB as they come, but %.2f MiB of memory are free: requests "
                       "will fail, or the system will end the process. Lower --ctx-size, or choose a smaller type\n",
                       __func__, n_bytes / MIB, n_free / MIB);
    }
}
