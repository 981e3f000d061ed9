// What a test found: a line for each check, and how many failed.
#pragma once

#include <cstdio>
#include <string>

static int n_failed = 0;

static void expect(bool ok, const std::string &what, double error = 0.0) {
    printf("  %-4s %s (%.2g)\n", ok ? "ok" : "FAIL", what.c_str(), error);
    fflush(stdout);
    n_failed += !ok;
}
