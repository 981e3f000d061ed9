"""Compare the tables by which GGUF files are read with the source of the pinned llama.cpp, where it is unpacked."""

import re

import llama_cpp_build
import pytest

from kvcache.models import gguf_models, gguf_tables
from kvcache.models.gguf_tables import WINDOWS

# Architectures whose windows our tables have otherwise than llama.cpp, and the reason.
OTHER_WINDOWS = {
    **dict.fromkeys(
        ["llama", "mistral3", "starcoder2"], "llama.cpp ignores the window; the model has it in all layers"
    ),
    "phi3": "llama.cpp switches windows off; the model has them in all layers",
    "deepseek2-ocr": "has no windows in llama.cpp, and a window in its files",
    "exaone4": "its default depends on the number of layers",
    "dflash": "needs a size with compressed rows alone, which are refused",
    "llama4": "has chunks, whose size is in a table of their own",
    "smallthinker": "llama.cpp takes 4,096 whatever the file says",
}
# The line of an architecture's graph that decides which layers rotate keys, without spaces.
ROTATES = {
    "afmoe": "use_rope=hparams.n_no_rope_layer_step>0&&(il+1)%hparams.n_no_rope_layer_step!=0;",
    "cohere2": "if(is_swa){",
    "cohere2moe": "if(is_swa||force_rope){",
    "exaone-moe": "if(is_local_layer){",
    "exaone4": "use_rope=hparams.is_swa(il)||hparams.swa_type==LLAMA_SWA_TYPE_NONE;",
    "granite_swa": "use_rope=hparams.has_rope(il);",
    **dict.fromkeys(
        ["granite", "granitehybrid", "granitemoe", "graniteswitch", "minicpm"], "if(hparams.has_rope(il)){"
    ),
    "llama4": "use_rope=hparams.n_no_rope_layer_step>0&&(il+1)%hparams.n_no_rope_layer_step!=0;",
    "maple": "if(hparams.is_swa(il)){",
    "muse-glimmer": "use_rope=hparams.is_swa(il);",
    "smallthinker": "use_rope=hparams.n_no_rope_layer_step==n_layer||il%hparams.n_no_rope_layer_step!=0;",
    "smollm3": "use_rope=(il+1)%hparams.n_no_rope_layer_step!=0;",
}


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def body(text, head):
    """Return a function's text, whose last line is a brace alone."""
    return re.search(rf"^{head}.*?^\}}", text, re.S | re.M)[0]


class Source:
    """The parts of llama.cpp's source that say what files leave out."""

    def __init__(self):
        folder = llama_cpp_build.sources() / "src"
        self.arch = without_comments((folder / "llama-arch.cpp").read_text())
        self.model = without_comments((folder / "llama-model.cpp").read_text())
        self.hparams = without_comments((folder / "llama-hparams.h").read_text())
        self.classes = without_comments((folder / "models/models.h").read_text())
        self.files = [without_comments(path.read_text()) for path in sorted(folder.glob("models/*.cpp"))]
        self.names = dict(re.findall(r'\{ (LLM_ARCH_\w+),\s*"([^"]+)"', self.arch))
        del self.names["LLM_ARCH_UNKNOWN"]
        text = body(self.model, r"static llama_model \* llama_model_mapping")
        grouped = re.findall(r"((?:case \w+:\s*)+)return new (\w+)\(", text)
        self.made = {self.names[case]: made for cases, made in grouped for case in re.findall(r"case (\w+):", cases)}

    def rope_types(self):
        """Return the rotations of each architecture, in the order of its switch."""
        text, found, cases, types = body(self.model, "llama_rope_type llama_model_rope_type"), {}, [], []
        for case, returned in re.findall(r"case (\w+):|return ([^;]+);", text):
            if case and types:
                cases, types = [], []
            if case:
                cases.append(case)
            else:
                types += re.findall(r"LLAMA_ROPE_TYPE_(\w+)", returned)
                found.update((self.names[each], {*types}) for each in cases if each in self.names)
        return found

    def base(self, name):
        found = re.search(rf"struct {name}\s*: public (\w+)", self.classes)
        return found and found[1]

    def loader(self, architecture):
        """Return the function that reads an architecture's own fields."""
        name = self.made[architecture]
        while name:
            for text in self.files:
                if f"void {name}::load_arch_hparams(" in text:
                    return body(text, rf"void {name}::load_arch_hparams\(")
            name = self.base(name)
        raise AssertionError(f"{architecture} has no loader")

    def graph(self, architecture):
        """Return the file that has an architecture's graph."""
        name = self.made[architecture]
        while name:
            described = body(self.classes, rf"struct {name}\s*:").rstrip("}")
            used = re.search(r"using graph\w*\s*=\s*(\w+)::graph", described)
            name = used[1] if used else name
            found = [text for text in self.files if re.search(rf"{name}::graph\w*(<\w+>)?::graph\w*\(", text)]
            if found:
                return found[0]
            name = self.base(name)
        return ""

    def read(self):
        """Return the loader and the graph of each architecture that is not refused."""
        names = self.made.keys() - gguf_tables.REFUSED.keys()
        return {name: (self.loader(name), self.graph(name)) for name in sorted(names)}


@pytest.fixture(scope="module")
def source():
    return Source()


@pytest.fixture(scope="module")
def loaders(source):
    return {name: loader for name, (loader, _) in source.read().items()}


def test_pairs_of_every_architecture(source):
    types = source.rope_types()
    assert (
        set(types) == set(source.names.values()) == gguf_tables.HALVES | gguf_tables.NEIGHBOURS | gguf_tables.UNROTATED
    )
    assert {name for name, found in types.items() if found == {"NONE"}} == gguf_tables.UNROTATED
    either = gguf_tables.HALVES_WITH_SECTIONS
    assert {name for name, found in types.items() if found in ({"NORM"}, {"MROPE", "NORM"})} == gguf_tables.NEIGHBOURS
    assert {name for name, found in types.items() if found == {"MROPE", "NORM"}} == either
    mixed = {name for name, found in types.items() if "NORM" in found and "NEOX" in found}
    assert mixed == {"dflash"}  # neighbours with hyper-connections, which are refused


def test_rotations_that_are_not_as_in_the_table_of_pairs(source):
    graphs = {name: graph for name, (_, graph) in source.read().items()}
    unrotated = {name for name, graph in graphs.items() if "ggml_rope" not in graph}
    assert unrotated - gguf_tables.UNROTATED == gguf_tables.EMBEDDED_POSITIONS - gguf_tables.UNROTATED - {"bert"}
    embedded = {name for name, graph in graphs.items() if "pos_embd" in graph} & unrotated
    assert embedded == (gguf_tables.EMBEDDED_POSITIONS | gguf_tables.EMBEDDED_OR_ALIBI) - {"bert"}
    bert = "if (model.arch == LLM_ARCH_NOMIC_BERT || model.arch == LLM_ARCH_NOMIC_BERT_MOE ||"
    assert bert in graphs["bert"][: graphs["bert"].index("ggml_rope")]
    calls = {name: re.sub(r"\s", "", graph) for name, graph in graphs.items()}
    whole = re.compile(r"ggml_rope\w*\([^;]*?,(n_embd_head|n_embed_head),")
    fixed = re.compile(r"ggml_rope\(|freq_base,1,0,1,0,0\)")
    mine = {"deepseek2"}  # its graph is also that of deepseek2-ocr, and of its own family only without heads
    family = {name for name, graph in calls.items() if graph == calls["deepseek2"]} - gguf_tables.PLAIN | mine
    assert {name for name, graph in calls.items() if whole.search(graph)} - family == gguf_tables.WHOLE_HEAD
    assert {name for name, graph in calls.items() if fixed.search(graph)} - family == gguf_tables.PLAIN
    assert "is_ocr=model.arch==LLM_ARCH_DEEPSEEK2OCR;" in calls["deepseek2-ocr"]
    assert "ocr_rope_type=GGML_ROPE_TYPE_NEOX;" in calls["deepseek2-ocr"]


def window_rule(loader):
    """Return the rule by which a loader gives layers windows; None: it gives none."""
    pattern = re.search(r"load_swa_pattern\(ml, (\d+)(,\s*true)?\)", loader)
    if pattern:
        every, first = int(pattern[1]), bool(pattern[2])
    elif "ml.get_arr(LLM_KV_ATTENTION_SLIDING_WINDOW_PATTERN" in loader:
        every, first = None, False
    elif "is_swa_impl[il] = !hparams.is_recr_impl[il]" in loader or "hparams.set_swa_pattern(0);" in loader:
        every, first = 0, False
    else:
        return None
    default = re.search(r"hparams\.n_swa\s*=\s*(\d+);", loader)
    needed = re.search(r"get_key\(LLM_KV_ATTENTION_SLIDING_WINDOW,\s*hparams\.n_swa\)", loader)
    return gguf_tables.Windows(every, first, None if needed else int(default[1]) if default else 0)


def test_windows(loaders):
    rules = {name: rule for name, loader in loaders.items() if (rule := window_rule(loader))}
    assert {name for name in rules.keys() | WINDOWS if rules.get(name) != WINDOWS.get(name)} == set(OTHER_WINDOWS)
    for name in ("exaone4", "llama4", "smallthinker"):
        assert rules[name][:2] == WINDOWS[name][:2]
    assert "if (hparams.n_layer() == 64) {" in loaders["exaone4"]
    assert rules["exaone4"].size == gguf_tables.EXAONE4_WINDOW
    chunked = {name for name, loader in loaders.items() if "LLAMA_SWA_TYPE_CHUNKED" in loader}
    assert {name: rules[name].size for name in chunked} == gguf_tables.CHUNKED
    both = {name for name, loader in loaders.items() if "LLAMA_SWA_TYPE_SYMMETRIC" in loader}
    assert both == gguf_tables.BOTH_SIDES
    assert "LLAMA_SWA_TYPE_NONE" in loaders["phi3"]


def test_rotations_of_windows(source):
    assert "rope_freq_base_train_swa  = 10000.0f;" in source.hparams
    assert "rope_freq_scale_train_swa = 1.0f;" in source.hparams
    own_base, unscaled = set(), set()
    for name, (loader, graph) in source.read().items():
        if window_rule(loader) is None:
            continue
        uses_base = "get_rope_freq_base" in graph or "hparams.rope_freq_base_train_swa :" in graph
        inherited = re.search(r"rope_freq_base_train_swa\s*=\s*hparams\.rope_freq_base_train;", loader)
        needed = re.search(r"get_key\(LLM_KV_ROPE_FREQ_BASE_SWA,\s*hparams\.rope_freq_base_train_swa\)", loader)
        if uses_base and not inherited and not needed:
            own_base.add(name)
        uses_scale = "get_rope_freq_scale" in graph or "hparams.rope_freq_scale_train_swa :" in graph
        inherited = re.search(r"rope_freq_scale_train_swa\s*=\s*hparams\.rope_freq_scale_train;", loader)
        if "freq_base, 1.0," in graph or (uses_scale and not inherited):
            unscaled.add(name)
    assert own_base == gguf_tables.OWN_BASE
    assert unscaled == gguf_tables.UNSCALED_IN_WINDOWS


def test_layers_that_rotate_no_keys(source, loaders):
    decides = re.compile(r"use_rope|has_rope\(|if ?\((is_swa|is_local_layer|hparams\.is_swa\(il\))( \|\| \w+)?\) \{")
    graphs = {name: graph for name, (_, graph) in source.read().items()}
    deciding = {name for name, graph in graphs.items() if decides.search(graph)} - gguf_tables.UNROTATED
    assert deciding - set(ROTATES) == {"dots3note", "mellum", "olmo2"}  # rotate otherwise there, or have other sizes
    for name, line in ROTATES.items():
        assert line in re.sub(r"\s", "", graphs[name]), name
    switched = {name for name, loader in loaders.items() if "LLM_KV_ROPE_SCALING_FINETUNED" in loader}
    assert switched == gguf_tables.SWITCHED_BY_FINETUNED
    assert {name for name, loader in loaders.items() if "LLM_KV_ATTENTION_ROPE_PATTERN" in loader} == {"granite_swa"}
    assert "n_no_rope_layer_step    = 4;" in source.hparams
    assert f"case {gguf_tables.BAICHUAN_UNROTATED}: type = LLM_TYPE_13B;" in loaders["baichuan"]


def test_other_facts_of_loaders(loaders):
    def found(pattern):
        return {name: match for name, loader in loaders.items() if (match := re.search(pattern, loader))}

    assert {name: int(m[1]) for name, m in found(r"full_attn_interval = (\d+);").items()} == gguf_tables.ATTENTION_EVERY
    assert {name: int(m[1]) for name, m in found(r"n_layer_kv_from_start = (\d+);").items()} == gguf_tables.OWN_ROWS
    assert {name: float(m[1]) for name, m in found(r"yarn_beta_fast = ([\d.]+)f;").items()} == gguf_tables.BETA_FAST
    assert set(found(r"n_rot_full = hparams\.n_rot_full / 2;")) == gguf_tables.HALF_OUTSIDE_WINDOWS
    assert set(found(r"rope_scaling_alpha > 0")) == gguf_tables.SCALED_BY_ALPHA
    assert set(found("LLM_KV_NUM_LOOPS")) == {"nanbeige"}
    assert set(found("router_layer  = ")) == {"graniteswitch"}
    assert set(found("LLM_KV_DECODER_BLOCK_COUNT")) == gguf_tables.ENCODER_DECODERS


def test_indexers(source, loaders):
    def asking(key):
        return {name for name, loader in loaders.items() if key in loader} - {"dflash"}  # compressed rows are refused

    graphs = {name: re.sub(r"\s", "", graph) for name, (_, graph) in source.read().items()}
    assert asking("LLM_KV_ATTENTION_INDEXER_TOP_K") == gguf_tables.INDEXERS.keys()
    assert asking("LLM_KV_ATTENTION_INDEXER_TYPES") == gguf_tables.SHARED_INDEXERS
    names = {"KPOOL": "glm5-next", "BLOCK_SIZE": "minimax-m3"}
    for key, name in names.items():
        assert asking(f"LLM_KV_ATTENTION_INDEXER_{key},") == {name}
        assert f"attention.indexer.{key.lower()}" in gguf_tables.INDEXERS[name]
    assert asking("LLM_KV_ATTENTION_COMPRESS_RATIOS") == {"deepseek4", "qwen4exp"}
    keys = re.compile(r"(?:indexer_k|ik)=ggml_rope_ext\([^;]*?(LLAMA_ROPE_TYPE_\w+|rope_type)")
    types = {name: found[1] for name in gguf_tables.INDEXERS if (found := keys.search(graphs[name]))}
    rows = {name: "NORM" if name in gguf_tables.NEIGHBOURS else "NEOX" for name in types}
    neighbours = {name for name, found in types.items() if "NORM" in found.replace("rope_type", rows[name])}
    assert types.keys() == gguf_tables.INDEXERS.keys() - {"deepseek4", "glm5-next", "qwen4exp"}  # cannot be moved
    assert neighbours == gguf_tables.INDEX_NEIGHBOURS
    assert "qwen4exp" in gguf_tables.HALVES  # of which its graph makes pairs in keys of an indexer, too
    assert f"hparams.n_ctx_train < {gguf_tables.GLM52_CONTEXT};" in loaders["glm-dsa"]
    ratios = re.findall(r"DSV4_\w+_RATIO=(\d+);", graphs["deepseek4"])
    assert gguf_tables.COMPRESSED.keys() == {0, *map(int, ratios)}


def test_what_is_refused(source):
    recurrent = body(source.arch, "bool llm_arch_is_recurrent")
    refused = {source.names[case] for case in re.findall(r"case (\w+):", recurrent)}
    assert refused == {name for name, reason in gguf_tables.REFUSED.items() if "state" in reason}
    assert set(source.names.values()) - source.made.keys() == {"gptj"}


def test_every_key_is_read_or_known_to_be_about_something_else(source):
    """A later llama.cpp may have keys that say what layers are."""
    keys = set(re.findall(r'LLM_KV_\w+,\s*"%s\.([^"]+)"', source.arch))
    assert keys >= gguf_tables.NOT_ABOUT_LAYERS
    text = (llama_cpp_build.ROOT / "kvcache/models/gguf_models.py").read_text()
    read = set(re.findall(r'"([a-z_.]+)[{"]', text)).union(gguf_tables.NAMES, *gguf_tables.INDEXERS.values())
    about = {key for key in keys if gguf_tables.ABOUT_LAYERS.search(key)} - gguf_tables.NOT_ABOUT_LAYERS
    assert about <= read
    assert gguf_models.FACTORS.removesuffix(".weight") in source.arch
    assert gguf_models.LONG_FACTORS.removesuffix(".weight") in source.arch
