#include "llama-kvcache-store.h"

#include "llama-kvcache-variables.h"

#include "llama-impl.h"

#ifdef LLAMA_KVCACHE_VALKEY
#include "valkey_store.h"
#endif

#ifndef _WIN32
#include <unistd.h>
#endif

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <regex>
#include <stdexcept>

static constexpr int MOST_FAILURES = 3;
static constexpr auto PAUSE = std::chrono::minutes(1);
static constexpr auto LAST_WRITES = std::chrono::seconds(10);
static constexpr int64_t MAX_BYTES = INT64_C(32) << 30;

//
// addresses
//

namespace {

struct place {
    std::string path; // dir:
    int64_t max_bytes = MAX_BYTES;
    std::string host; // valkey:
    int32_t port = 0;
};

// returns an address without the password that it may have
std::string shown(const std::string &address) {
    const size_t at = address.rfind("valkey:", 0) == 0 ? address.rfind('@') : std::string::npos;

    return at == std::string::npos ? address : "valkey:***" + address.substr(at);
}

[[noreturn]] void refuse(const std::string &address, const std::string &reason) {
    throw std::runtime_error(llama_kvcache_variable("LLAMA_KVCACHE_PREFIX") + " is '" + shown(address) +
                             "': " + reason);
}

// Returns the bytes of a size as people write it: GiB and G are 2^30, GB is 10^9, "20 GB" has a space.  Returns 0 if it
// is none.  Python's stores take the same.
int64_t bytes_of(const std::string &size) {
    static const std::regex SIZE(R"((\d+(\.\d+)?) ?(([kmgt])(i?b)?|b)?)", std::regex::icase);
    std::smatch found;

    if (!std::regex_match(size, found, SIZE) || (found[2].matched && !found[4].matched)) { // a part of a byte
        return 0;
    }

    const double base = found[5].length() == 1 ? 1000 : 1024; // GB, unlike GiB and G
    const size_t power = found[4].matched ? std::string("kmgt").find((char)tolower(*found[4].first)) + 1 : 0;
    const double res = std::stod(found[1].str().substr(0, 40)) * std::pow(base, (double)power);

    return res < 9e18 ? (int64_t)res : 0;
}

place folder_of(const std::string &address) {
    static const std::string OPTION = "?max_bytes=";

    place res;
    const std::string rest = address.substr(strlen("dir:"));
    const size_t at = rest.find('?');

    res.path = rest.substr(0, at);
    if (res.path.empty()) {
        refuse(address, "there is no folder in it: write dir:/path");
    }
    if (res.path[0] == '~') { // shells leave the ~ behind the colon alone
        const char *home = getenv("HOME");

        if (!home || (res.path + "/")[1] != '/') {
            refuse(address, "no home folder is known for its ~: write dir:/path");
        }
        res.path.replace(0, 1, home);
    }
    res.path = std::filesystem::absolute(res.path).string();
    if (at != std::string::npos) {
        if (rest.compare(at, OPTION.size(), OPTION) != 0) {
            refuse(address, "the option of a folder is max_bytes: write dir:/path?max_bytes=20GiB");
        }
        res.max_bytes = bytes_of(rest.substr(at + OPTION.size()));
        if (res.max_bytes <= 0) {
            refuse(address, "max_bytes is '" + rest.substr(at + OPTION.size()) +
                                "': write a number of bytes, such as 20GB or 20GiB");
        }
    }

    return res;
}

place server_of(const std::string &address) {
#ifdef LLAMA_KVCACHE_VALKEY
    place res;
    const bool has_slashes = address.rfind("valkey://", 0) == 0;
    const std::string rest = address.substr(strlen(has_slashes ? "valkey://" : "valkey:"));
    const size_t at = rest.rfind(':');
    char *end = nullptr;
    const long port = at == std::string::npos ? 0 : strtol(rest.c_str() + at + 1, &end, 10);

    res.host = rest.substr(0, at);
    if (res.host.find_first_of("@/?") != std::string::npos) {
        refuse(address, "write valkey:host:port, and set LLAMA_KVCACHE_VALKEY_USER and LLAMA_KVCACHE_VALKEY_PASSWORD");
    }
    if (res.host.size() > 2 && res.host.front() == '[' && res.host.back() == ']') { // an IPv6 address
        res.host = res.host.substr(1, res.host.size() - 2);
    }
    if (res.host.empty() || port < 1 || port > 65535 || *end) {
        refuse(address, "a server has a host and a port: write valkey:127.0.0.1:6379");
    }
    res.port = (int32_t)port;

    return res;
#else
    refuse(address, "this build has no client for servers: build it with build.sh --valkey, or write dir:/path");
#endif
}

place place_of(const std::string &address) {
    if (address.rfind("dir:", 0) == 0) {
        return folder_of(address);
    }
    if (address.rfind("valkey:", 0) == 0) {
        return server_of(address);
    }
    refuse(address, "set it to on, off, dir:/path or valkey:host:port");
}

constexpr const char *WRITABLE = ": name a folder that can be made and written to";

// On Windows the rights of a folder do not show before the first file is made.
bool is_writable(const std::string &folder) {
#ifdef _WIN32
    return !folder.empty();
#else
    return access(folder.c_str(), W_OK | X_OK) == 0;
#endif
}

#ifdef LLAMA_KVCACHE_VALKEY
// returns a variable that names who logs in to a server, nullptr if it is not set
const char *login_of(const std::string &address, const char *variable) {
    const char *res = getenv(variable);

    if (res && !*res) {
        refuse(address, std::string(variable) + " is empty: set it, or leave it out");
    }

    return res;
}
#endif

std::unique_ptr<kvc_store, void (*)(kvc_store *)> open(const std::string &address) {
    const place at = place_of(address);
    kvc_store *res = nullptr;
    kvc_status status;
    void (*free)(kvc_store *) = kvc_dir_store_free;

    if (at.host.empty()) {
        status = kvc_dir_store_new(at.path.c_str(), at.max_bytes, &res);
    } else {
#ifdef LLAMA_KVCACHE_VALKEY
        valkey_options options = {};

        options.host = at.host.c_str();
        options.port = at.port;
        options.user = login_of(address, "LLAMA_KVCACHE_VALKEY_USER");
        options.password = login_of(address, "LLAMA_KVCACHE_VALKEY_PASSWORD");
        status = valkey_store_new(&options, &res);
        free = valkey_store_free;
#else
        status = KVC_ERR_UNSUPPORTED;
#endif
    }
    if (status) {
        refuse(address, std::string(kvc_last_error()) + (at.host.empty() ? WRITABLE : ""));
    }
    if (at.host.empty() && !is_writable(at.path)) {
        free(res);
        refuse(address, std::string("it cannot be written to") + WRITABLE);
    }

    return {res, free};
}

} // namespace

void llama_kvcache_store::check(const std::string &address) { place_of(address); }

std::string llama_kvcache_store::description() const {
    const place at = place_of(address);

    return at.host.empty() ? format("dir:%s (up to %.2f GiB)", at.path.c_str(), at.max_bytes / 1024.0 / 1024.0 / 1024.0)
                           : address;
}

void llama_kvcache_store::check_value(int64_t n_bytes) const {
    const place at = place_of(address);

    if (at.host.empty() && n_bytes > at.max_bytes) {
        const long long least = (n_bytes + 1023) / 1024;

        refuse(address, format("a block of this model takes %lld KiB: write ?max_bytes=%lldKiB or more", least, least));
    }
}

//
// what may fail
//

bool llama_kvcache_store::is_left_alone(const failures &of) {
    std::lock_guard<std::mutex> lock(mutex);

    return of.n >= MOST_FAILURES && clock::now() < of.over;
}

std::pair<int64_t, int64_t> llama_kvcache_store::n_failures() {
    std::lock_guard<std::mutex> lock(mutex);

    return {reads.n_all, writes.n_all};
}

kvc_status llama_kvcache_store::noted(failures &of, kvc_status status) {
    std::lock_guard<std::mutex> lock(mutex);

    of.n = status ? of.n + 1 : 0;
    of.n_all += status != KVC_OK;
    of.over = clock::now() + PAUSE;
    if (of.n == 1) {
        LLAMA_LOG_WARN("%s: cannot %s %s: %s\n", __func__, of.what, address.c_str(), kvc_last_error());
    }
    if (of.n == MOST_FAILURES) {
        LLAMA_LOG_WARN("%s: no attempt to %s for a minute, then one a minute: %s\n", __func__, of.what,
                       address.c_str());
    }

    return status;
}

kvc_status llama_kvcache_store::read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes,
                                           int64_t *size) {
    auto *self = (llama_kvcache_store *)user;

    *size = 0;
    if (self->is_left_alone(self->reads)) {
        return KVC_OK;
    }

    return self->noted(self->reads, self->store->read(self->store->user, name, value, max_bytes, size));
}

kvc_status llama_kvcache_store::write_value(void *user, const uint8_t *name, const void *value, int64_t size) {
    auto *self = (llama_kvcache_store *)user;
    {
        std::lock_guard<std::mutex> lock(self->mutex);

        if (clock::now() > self->deadline) {
            ++self->n_dropped;
            return KVC_OK;
        }
    }
    if (self->is_left_alone(self->writes)) {
        return KVC_OK;
    }

    return self->noted(self->writes, self->store->write(self->store->user, name, value, size));
}

//
// reading and writing
//

llama_kvcache_store::llama_kvcache_store(const std::string &address)
    : address(address), store(open(address)), guarded{sizeof(kvc_store), this, read_value, write_value, nullptr} {
    thread = std::thread(&llama_kvcache_store::work, this);
}

llama_kvcache_store::~llama_kvcache_store() { finish(); }

void llama_kvcache_store::fetch(kvc_prefix *prefix, const kvc_tokens &tokens) {
    int32_t n;
    const kvc_status status = kvc_prefix_fetch(prefix, &tokens, -1, &guarded, &n);

    if (status && status != KVC_ERR_STORE) { // which was logged
        LLAMA_LOG_WARN("%s: %s: %s\n", __func__, address.c_str(), kvc_last_error());
    }
}

void llama_kvcache_store::write(kvc_cache *new_cache) {
    std::lock_guard<std::mutex> lock(mutex);

    cache = new_cache;
    has_work = true;
    changed.notify_one();
}

// A block that could not be written is not tried again, so that this ends.
void llama_kvcache_store::write_new() {
    int64_t n;
    kvc_status status;

    do {
        status = kvc_store_new_blocks(cache, &guarded, &n);
    } while (status == KVC_ERR_STORE);

    if (status) {
        LLAMA_LOG_WARN("%s: %s: %s\n", __func__, address.c_str(), kvc_last_error());
    }
}

void llama_kvcache_store::work() {
    std::unique_lock<std::mutex> lock(mutex);

    while (has_work || !is_over) {
        if (!has_work) {
            changed.wait(lock);
            continue;
        }

        has_work = false;
        lock.unlock();
        write_new();
        lock.lock();
    }
}

void llama_kvcache_store::finish() {
    if (!thread.joinable()) {
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);

        is_over = true;
        deadline = clock::now() + LAST_WRITES;
        changed.notify_one();
    }
    thread.join();
    if (n_dropped) {
        LLAMA_LOG_WARN("%s: %lld blocks were not written in time: %s\n", __func__, (long long)n_dropped,
                       address.c_str());
    }
}
