// The blocks of prompts outside of the cache: in a folder, or on a server.
#pragma once

#include "kvcache.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

// What fails costs speed, and no answer: it is logged, and after a few failures in a row the store is left alone for a
// while, for reading or for writing: it is as if it had nothing, and took everything.
class llama_kvcache_store {
  public:
    // opens a store by its address; throws std::runtime_error with what is wrong, and what would do
    explicit llama_kvcache_store(const std::string &address);
    ~llama_kvcache_store();

    // throws as the constructor does where an address is none, and opens nothing
    static void check(const std::string &address);

    // throws as the constructor does if the store cannot hold a value of so many bytes
    void check_value(int64_t n_bytes) const;

    // returns where it is, and how many bytes it may take, for the log
    std::string description() const;

    // returns how many reads and writes have failed so far
    std::pair<int64_t, int64_t> n_failures();

    // adds what the cache lacks of a prompt's blocks
    void fetch(kvc_prefix *prefix, const kvc_tokens &tokens);

    // writes the blocks that were kept since the last call, on a thread of the store's own
    void write(kvc_cache *cache);

    // writes what is left, as far as that takes no longer than a few seconds, and ends the thread; before the cache is
    // freed
    void finish();

  private:
    using clock = std::chrono::steady_clock;

    struct failures {
        const char *what;
        int n = 0; // in a row
        int64_t n_all = 0;
        clock::time_point over = {};
    };

    static kvc_status read_value(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size);
    static kvc_status write_value(void *user, const uint8_t *name, const void *value, int64_t size);

    bool is_left_alone(const failures &of);
    kvc_status noted(failures &of, kvc_status status);

    void work();
    void write_new();

    const std::string address;
    const std::unique_ptr<kvc_store, void (*)(kvc_store *)> store;
    const kvc_store guarded; // the same, with what fails left alone

    kvc_cache *cache = nullptr;

    std::thread thread;
    std::mutex mutex; // for all that follows
    std::condition_variable changed;
    bool has_work = false;
    bool is_over = false;
    clock::time_point deadline = clock::time_point::max();
    failures reads = {"read"};
    failures writes = {"write"};
    int64_t n_dropped = 0; // blocks, behind the deadline
};
