// Python's view of host/sampling.h. Shapes are checked here; the kernels check nothing.
#include "host/sampling.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "bind/tensor_caster.h"

namespace py = pybind11;
namespace sampling = lamella::host::sampling;
using lamella::abi::DType;
using lamella::abi::TensorView;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

sampling::Logits logits_of(const TensorView& view) {
  require(view.device_type == 1 && view.dtype == DType::f32 && view.num_dims == 2,
          "logits must be float32 [L, V] on the CPU");
  require(view.shape[1] > 0 && view.shape[1] < (int64_t{1} << 31) - 64, "logits must have a vocabulary");
  require(view.strides[1] == 1 || view.shape[1] == 1, "rows of logits must be contiguous");
  return {view.as<float>(), view.strides[0], view.shape[0], static_cast<int32_t>(view.shape[1])};
}

template <class T>
T* vector_of(const TensorView& view, DType dtype, int64_t size, const char* what) {
  require(view.device_type == 1 && view.dtype == dtype && view.num_elements() == size, what);
  require(size == 0 || view.contiguous(), what);
  return view.as<T>();
}

template <class T>
const T* numbers(const Array<T>& array, int64_t size, const char* what) {
  require(array.size() == size, what);
  return array.data();
}

void within(const int32_t* values, int64_t n, int64_t limit, const char* what) {
  for (int64_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= limit)
      throw py::index_error(std::string(what) + " " + std::to_string(values[i]) + " is not in [0, " +
                            std::to_string(limit) + ")");
}

void greedy(const TensorView& logits, const TensorView& ids, const TensorView& status) {
  const sampling::Logits rows = logits_of(logits);
  int32_t* out = vector_of<int32_t>(ids, DType::i32, rows.count, "ids must be int32 [L]");
  uint8_t* states = vector_of<uint8_t>(status, DType::u8, rows.count, "status must be uint8 [L]");
  py::gil_scoped_release free;
  sampling::greedy(rows, out, states);
}

void choose(const TensorView& logits, const Array<float>& temperature, const Array<float>& inverse_temperature,
            const Array<double>& log_min_p, const Array<int32_t>& top_k, const Array<double>& top_p,
            const Array<uint64_t>& keys, const Array<int32_t>& positions, uint32_t salt, const TensorView& ids,
            const TensorView& status) {
  const sampling::Logits rows = logits_of(logits);
  const char* what = "every parameter must have one number per row of logits";
  const sampling::Choice choice{numbers(temperature, rows.count, what), numbers(inverse_temperature, rows.count, what),
                                numbers(log_min_p, rows.count, what),   numbers(top_k, rows.count, what),
                                numbers(top_p, rows.count, what),       numbers(keys, rows.count, what),
                                numbers(positions, rows.count, what),   salt};
  int32_t* out = vector_of<int32_t>(ids, DType::i32, rows.count, "ids must be int32 [L]");
  uint8_t* states = vector_of<uint8_t>(status, DType::u8, rows.count, "status must be uint8 [L]");
  py::gil_scoped_release free;
  sampling::choose(rows, choice, out, states);
}

void logprobs(const TensorView& logits, const Array<int32_t>& rows, const TensorView& token_ids, int32_t k,
              const TensorView& chosen, const TensorView& ranks, const TensorView& best_ids, const TensorView& best) {
  const sampling::Logits all = logits_of(logits);
  const int64_t n = rows.size();
  require(k >= 0 && k <= all.vocab_size, "k must be between 0 and the size of the vocabulary");
  within(rows.data(), n, all.count, "row");
  const int32_t* given = vector_of<int32_t>(token_ids, DType::i32, n, "token_ids must be int32 [n]");
  within(given, n, all.vocab_size, "token id");
  float* out = vector_of<float>(chosen, DType::f32, n, "chosen must be float32 [n]");
  int32_t* places = vector_of<int32_t>(ranks, DType::i32, n, "ranks must be int32 [n]");
  int32_t* found_ids = vector_of<int32_t>(best_ids, DType::i32, n * k, "best_ids must be int32 [n, k]");
  float* found = vector_of<float>(best, DType::f32, n * k, "best must be float32 [n, k]");
  const int32_t* which = rows.data();
  py::gil_scoped_release free;
  sampling::logprobs(all, n, which, given, k, out, places, found_ids, found);
}

void penalise(const TensorView& logits, const Array<int32_t>& logits_rows, const Array<int64_t>& start,
              const Array<int32_t>& token_ids, const Array<int32_t>& counts, const Array<float>& repetition,
              const Array<float>& frequency, const Array<float>& presence) {
  const sampling::Logits all = logits_of(logits);
  const int64_t n = logits_rows.size(), num_entries = token_ids.size();
  const int64_t* begin = numbers(start, n + 1, "start must have one number more than there are rows");
  within(logits_rows.data(), n, all.count, "row");
  within(token_ids.data(), num_entries, all.vocab_size, "token id");
  require(begin[0] == 0 && begin[n] == num_entries, "start must cover the entries");
  for (int64_t j = 0; j < n; ++j) require(begin[j] <= begin[j + 1], "start must ascend");
  const char* what = "every penalty must have one number per row";
  const sampling::Penalties penalties{n,
                                      logits_rows.data(),
                                      begin,
                                      token_ids.data(),
                                      numbers(counts, num_entries, "there must be one count per entry"),
                                      numbers(repetition, n, what),
                                      numbers(frequency, n, what),
                                      numbers(presence, n, what)};
  py::gil_scoped_release free;
  sampling::penalise(all, penalties);
}

void mask(const TensorView& logits, const Array<int32_t>& rows, const Array<int32_t>& words) {
  const sampling::Logits all = logits_of(logits);
  const int64_t n = rows.size();
  within(rows.data(), n, all.count, "row");
  const auto* bits = reinterpret_cast<const uint32_t*>(
      numbers(words, n * ((all.vocab_size + 31) / 32), "words must be int32 [M, ceil(V / 32)]"));
  const int32_t* which = rows.data();
  py::gil_scoped_release free;
  sampling::mask(all, n, which, bits);
}

}  // namespace

void bind_sampling(py::module_& m) {
  m.def("sampling_greedy", &greedy, py::arg("logits"), py::arg("ids"), py::arg("status"));
  m.def("sampling_choose", &choose, py::arg("logits"), py::arg("temperature").noconvert(),
        py::arg("inverse_temperature").noconvert(), py::arg("log_min_p").noconvert(), py::arg("top_k").noconvert(),
        py::arg("top_p").noconvert(), py::arg("keys").noconvert(), py::arg("positions").noconvert(), py::arg("salt"),
        py::arg("ids"), py::arg("status"));
  m.def("sampling_logprobs", &logprobs, py::arg("logits"), py::arg("rows").noconvert(), py::arg("token_ids"),
        py::arg("k"), py::arg("chosen"), py::arg("ranks"), py::arg("best_ids"), py::arg("best"));
  m.def("sampling_penalise", &penalise, py::arg("logits"), py::arg("logits_rows").noconvert(),
        py::arg("start").noconvert(), py::arg("token_ids").noconvert(), py::arg("counts").noconvert(),
        py::arg("repetition").noconvert(), py::arg("frequency").noconvert(), py::arg("presence").noconvert());
  m.def("sampling_mask", &mask, py::arg("logits"), py::arg("rows").noconvert(), py::arg("words").noconvert());
}
