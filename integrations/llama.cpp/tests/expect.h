// What a test found: a line for each check, and how many failed.
#pragma once

#include <cstdio>
#include <string>

static int n_failed = 0;
static bool only_failures = false; // are printed

static void expect(bool ok, const std::string &what, double found = 0.0) {
    if (!ok || !only_failures) {
        printf("  %-4s %s (%.9g)\n", ok ? "ok" : "FAIL", what.c_str(), found);
        fflush(stdout);
    }
    n_failed += !ok;
}
