"""Requests of several tenants in any order, against a dictionary of token tuples."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.prefixes import BLOCK, POLICIES, check_rows, common, feed, make_cache

import kvcache

TOKENS = st.lists(st.integers(0, 2), max_size=40)
SALTS = [b"", b"a tenant"]


class Requests(RuleBasedStateMachine):
    """`seen` has every tuple of tokens that was fed; what is matched begins one of them, and has its rows."""

    @initialize(kind=st.sampled_from(list(POLICIES)), capacity=st.sampled_from([None, 12 * BLOCK]))
    def begin(self, kind, capacity):
        self.cache = make_cache(kind, capacity=capacity)
        self.prefixes = [kvcache.PrefixCache(self.cache, fingerprint="a model", salt=salt) for salt in SALTS]
        self.seen = [[] for _ in SALTS]
        self.kept = capacity is None  # nothing was ever dropped, so that the longest match is there
        self.running = {}  # by sequence: its tenant, its tokens, and whether its rows are right
        self.pinned = [[] for _ in SALTS]

    @rule(tenant=st.integers(0, 1), data=st.data(), more=TOKENS)
    def acquire(self, tenant, data, more):
        old = data.draw(st.sampled_from(self.seen[tenant])) if self.seen[tenant] else []
        prompt = old[: data.draw(st.integers(0, len(old)))] + more + [0]
        seq_id, matched = self.prefixes[tenant].acquire(prompt)
        assert seq_id not in self.running
        best = max((common(tokens, prompt[:-1]) for tokens in self.seen[tenant]), default=0)
        assert matched <= best
        check_rows(self.cache, seq_id, prompt, matched)
        if self.kept and not any(owner == tenant for owner, _ in self.running.values()):
            assert matched == best
        self.running[seq_id] = tenant, prompt
        self.feed_to(seq_id, len(prompt))

    def feed_to(self, seq_id, end, step=None):
        tenant, tokens = self.running[seq_id]
        try:
            feed(self.cache, seq_id, tokens, self.cache.next_position(seq_id), end, step)
        except kvcache.CacheFullError:
            stats = self.cache.stats()
            assert stats["retained"] == 0 or self.kept is False
        self.seen[tenant].append(tokens[: self.cache.next_position(seq_id)])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=TOKENS, step=st.integers(1, 30))
    def generate(self, data, more, step):
        seq_id = data.draw(st.sampled_from(sorted(self.running)))
        tenant, tokens = self.running[seq_id]
        self.running[seq_id] = tenant, tokens[: self.cache.next_position(seq_id)] + more
        self.feed_to(seq_id, len(self.running[seq_id][1]), step)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_back(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.running)))
        length = data.draw(st.integers(0, self.cache.next_position(seq_id)))
        if self.cache.can_resume(length, seq_id=seq_id):
            self.cache.truncate(length, seq_id=seq_id)
            tenant, tokens = self.running[seq_id]
            self.running[seq_id] = tenant, tokens[:length]
            self.kept = False  # a block that was cut is not kept twice

    @precondition(lambda self: self.running)
    @rule(data=st.data(), clears=st.booleans())
    def end(self, data, clears):
        seq_id = data.draw(st.sampled_from(sorted(self.running)))
        tenant, tokens = self.running.pop(seq_id)
        if clears:
            self.cache.clear(seq_id)
            self.kept = False
        else:
            self.prefixes[tenant].release(seq_id, tokens)

    @rule(tenant=st.integers(0, 1), data=st.data())
    def pin(self, tenant, data):
        if self.seen[tenant] and len(self.pinned[tenant]) < 2:
            tokens = data.draw(st.sampled_from(self.seen[tenant]))
            pinned = self.prefixes[tenant].pin(tokens)
            assert pinned <= len(tokens)
            self.pinned[tenant].append(tokens)

    @rule(tenant=st.integers(0, 1))
    def unpin(self, tenant):
        if self.pinned[tenant]:
            self.prefixes[tenant].unpin(self.pinned[tenant].pop())

    @rule(tenant=st.integers(0, 1), num_tokens=st.integers(0, 60))
    def evict(self, tenant, num_tokens):
        self.prefixes[tenant].evict(num_tokens)
        self.kept = False

    @rule(tenant=st.integers(0, 1))
    def clear(self, tenant):
        self.prefixes[tenant].clear()
        self.kept = False

    @invariant()
    def holds(self):
        if not hasattr(self, "cache"):
            return
        self.cache.validate()
        for seq_id, (_, tokens) in self.running.items():
            check_rows(self.cache, seq_id, tokens, min(len(tokens), self.cache.next_position(seq_id)))

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for seq_id in list(self.running):
            self.cache.clear(seq_id)
        for prefix in self.prefixes:
            prefix.clear()
        stats = self.cache.stats()
        assert (stats["live_slots"], stats["retained"]) == (0, 0)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
