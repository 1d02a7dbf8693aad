#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"
#include "sampling/edits.h"
#include "sampling/sample.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;
using Optional = std::optional<TensorView>;

constexpr int64_t kMaxVocab = 262'144;

void check_logits(const TensorView& logits) {
  check(logits, "logits", {DType::f32, DType::bf16}, {-1, -1});
  require(logits.shape[1] >= 1 && logits.shape[1] <= kMaxVocab, "logits",
          "has " + std::to_string(logits.shape[1]) + " columns, served are 1 to " + std::to_string(kMaxVocab));
}

// Elements of an optional vector beside logits; null where it is missing. size < 0: any.
template <class T>
T* vector(const Optional& given, const char* name, DType dtype, int64_t size, const TensorView& logits) {
  if (!given) return nullptr;
  check_contiguous(*given, name, {dtype}, {size});
  check_same_device(*given, name, logits);
  return given->as<T>();
}

void* workspace_of(const TensorView& workspace, const TensorView& logits) {
  check_contiguous(workspace, "workspace", {DType::u8}, {-1});
  check_same_device(workspace, "workspace", logits);
  const int64_t needed = lamella_sampling_workspace_bytes(logits.shape[0], logits.shape[1]);
  require(workspace.shape[0] >= needed, "workspace",
          "has " + std::to_string(workspace.shape[0]) + " bytes, needed " + std::to_string(needed));
  check_aligned(workspace, "workspace");
  return workspace.data;
}

void sample(const TensorView& ids, const Optional& status, const Optional& logprobs, const TensorView& logits,
            const TensorView& workspace, const Optional& rows, const Optional& temperature, const Optional& top_k,
            const Optional& top_p, const Optional& min_p, const Optional& seeds, const Optional& positions,
            uint32_t salt) {
  check_logits(logits);
  const int64_t num = logits.shape[0];
  LamellaSample what = {};
  what.logits = logits.data;
  what.stride = logits.strides[0];
  what.num_rows = num;
  what.vocab_size = logits.shape[1];
  what.rows = vector<int32_t>(rows, "rows", DType::i32, num, logits);
  int64_t num_params = rows ? -1 : num;
  const auto size_of = [&](const Optional& given) {  // all of one size, which `rows` index
    if (given && num_params < 0 && given->num_dims == 1) num_params = given->shape[0];
    return num_params;
  };
  what.temperature = vector<float>(temperature, "temperature", DType::f32, size_of(temperature), logits);
  what.top_k = vector<int32_t>(top_k, "top_k", DType::i32, size_of(top_k), logits);
  what.top_p = vector<double>(top_p, "top_p", DType::f64, size_of(top_p), logits);
  what.min_p = vector<double>(min_p, "min_p", DType::f64, size_of(min_p), logits);
  what.seeds = vector<uint64_t>(seeds, "seeds", DType::i64, size_of(seeds), logits);
  what.positions = vector<int32_t>(positions, "positions", DType::i32, num, logits);
  require(!temperature || seeds.has_value(), "seeds", "missing, and temperature is given");
  require(!temperature || positions.has_value(), "positions", "missing, and temperature is given");
  what.salt = salt;
  what.ids = vector<int32_t>(ids, "ids", DType::i32, num, logits);
  what.status = vector<uint8_t>(status, "status", DType::u8, num, logits);
  what.logprobs = vector<float>(logprobs, "logprobs", DType::f32, num, logits);
  what.workspace = workspace_of(workspace, logits);
  what.elem = elem_of(logits.dtype);
  const OnDevice on(logits);
  succeed(lamella_sample(&what, on.stream), "sample");
}

void top_logprobs(const TensorView& best_ids, const TensorView& best, const Optional& chosen, const Optional& ranks,
                  const Optional& logsumexp, const TensorView& logits, const Optional& token_ids,
                  const TensorView& workspace) {
  check_logits(logits);
  const int64_t num = logits.shape[0];
  check_contiguous(best_ids, "best_ids", {DType::i32}, {num, -1});
  const int64_t k = best_ids.shape[1];
  require(k <= 1024 && k <= logits.shape[1], "num_best",
          "is " + std::to_string(k) + ", the limit is 1024 and the number of columns");
  check_contiguous(best, "best", {DType::f32}, {num, k});
  check_same_device(best_ids, "best_ids", logits);
  check_same_device(best, "best", logits);
  LamellaTopLogprobs what = {};
  what.logits = logits.data;
  what.stride = logits.strides[0];
  what.num_rows = num;
  what.vocab_size = logits.shape[1];
  what.num_best = k;
  what.best_ids = best_ids.as<int32_t>();
  what.best = best.as<float>();
  what.token_ids = vector<int32_t>(token_ids, "token_ids", DType::i32, num, logits);
  if (token_ids) {
    require(chosen && ranks, "chosen", "and ranks are needed with token_ids");
    what.chosen = vector<float>(chosen, "chosen", DType::f32, num, logits);
    what.ranks = vector<int32_t>(ranks, "ranks", DType::i32, num, logits);
  }
  what.logsumexp = vector<float>(logsumexp, "out", DType::f32, num, logits);
  what.workspace = workspace_of(workspace, logits);
  what.elem = elem_of(logits.dtype);
  const OnDevice on(logits);
  succeed(lamella_top_logprobs(&what, on.stream), "top_logprobs");
}

void apply_penalties(const TensorView& logits, const TensorView& counts, const Optional& prompt,
                     const Optional& repetition, const Optional& frequency, const Optional& presence,
                     const Optional& rows) {
  check(logits, "logits", {DType::f32, DType::bf16}, {-1, -1});
  const int64_t num = logits.shape[0], vocab_size = logits.shape[1];
  check(counts, "counts", {DType::i32}, {rows ? -1 : num, vocab_size});
  check_same_device(counts, "counts", logits);
  const int64_t params = counts.shape[0];
  if (prompt) {
    check(*prompt, "prompt", {DType::i32}, {params, (vocab_size + 31) / 32});
    check_same_device(*prompt, "prompt", logits);
  }
  const auto* r = vector<float>(repetition, "repetition", DType::f32, params, logits);
  const auto* f = vector<float>(frequency, "frequency", DType::f32, params, logits);
  const auto* p = vector<float>(presence, "presence", DType::f32, params, logits);
  const auto* which = vector<int32_t>(rows, "rows", DType::i32, num, logits);
  const OnDevice on(logits);
  succeed(lamella_apply_penalties(logits.data, logits.strides[0], num, vocab_size, which, counts.as<int32_t>(),
                                  counts.strides[0], prompt ? prompt->as<int32_t>() : nullptr,
                                  prompt ? prompt->strides[0] : 0, r, f, p, elem_of(logits.dtype), on.stream),
          "apply_penalties");
}

void apply_bitmask(const TensorView& logits, const TensorView& words, const Optional& rows) {
  check(logits, "logits", {DType::f32, DType::bf16}, {-1, -1});
  const int64_t vocab_size = logits.shape[1];
  check(words, "words", {DType::i32}, {rows ? -1 : logits.shape[0], (vocab_size + 31) / 32});
  check_same_device(words, "words", logits);
  const auto* which = vector<int32_t>(rows, "rows", DType::i32, words.shape[0], logits);
  const OnDevice on(logits);
  succeed(lamella_apply_bitmask(logits.data, logits.strides[0], words.shape[0], vocab_size, which,
                                words.as<int32_t>(), words.strides[0], elem_of(logits.dtype), on.stream),
          "apply_bitmask");
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("sampling_workspace_bytes", &lamella_sampling_workspace_bytes, py::arg("num_rows"), py::arg("vocab_size"));
  m.def("sample", &sample, py::arg("ids"), py::arg("status"), py::arg("logprobs"), py::arg("logits"),
        py::arg("workspace"), py::arg("rows"), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
        py::arg("min_p"), py::arg("seeds"), py::arg("positions"), py::arg("salt"));
  m.def("top_logprobs", &top_logprobs, py::arg("best_ids"), py::arg("best"), py::arg("chosen"), py::arg("ranks"),
        py::arg("logsumexp"), py::arg("logits"), py::arg("token_ids"), py::arg("workspace"));
  m.def("apply_penalties", &apply_penalties, py::arg("logits"), py::arg("counts"), py::arg("prompt"),
        py::arg("repetition"), py::arg("frequency"), py::arg("presence"), py::arg("rows"));
  m.def("apply_bitmask", &apply_bitmask, py::arg("logits"), py::arg("words"), py::arg("rows"));
}

}  // namespace lamella::bind
