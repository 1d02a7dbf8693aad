// lamella.specdec._C: the native n-gram and suffix indexes. Their Python twins are lamella/specdec/drafters/ngram_index.py
// and suffix_index.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "ngram/ngram_index.h"
#include "suffix/suffix_index.h"

namespace py = pybind11;
using lamella::specdec::NgramRows;
using lamella::specdec::NgramRule;
using lamella::specdec::RowIndex;
using lamella::specdec::SuffixRow;
using lamella::specdec::SuffixRows;
using lamella::specdec::SuffixRule;

namespace {

constexpr long kMaxTokenId = 0x7FFFFFFF;

[[noreturn]] void refuse(const std::string& message) {
  const py::object error = py::module_::import("lamella.specdec.errors").attr("InputError");
  PyErr_SetString(error.ptr(), message.c_str());
  throw py::error_already_set();
}

// ids[from, len) of a Python sequence, without a copy of the part before them unless it is neither list nor tuple
// (then without one either, if its slices are cheap).
py::object tail(const py::handle& ids, Py_ssize_t from, Py_ssize_t len) {
  py::object part = PyList_Check(ids.ptr()) || PyTuple_Check(ids.ptr())
                        ? py::reinterpret_borrow<py::object>(ids)
                        : py::reinterpret_steal<py::object>(PySequence_GetSlice(ids.ptr(), from, len));
  if (!part) throw py::error_already_set();
  py::object fast = py::reinterpret_steal<py::object>(PySequence_Fast(part.ptr(), "token ids must be a sequence"));
  if (!fast) throw py::error_already_set();
  return fast;
}

// Appends to `index`, the row's, the ids beyond those it has.
template <class Index>
void append_new(Index& index, std::int64_t row, const py::handle& ids) {
  const Py_ssize_t len = PySequence_Size(ids.ptr());
  if (len < 0) throw py::error_already_set();
  const auto known = static_cast<Py_ssize_t>(index.size());
  if (len < known) {
    refuse("row " + std::to_string(row) + " had " + std::to_string(known) + " ids and now has " + std::to_string(len) +
           ": forget the row first, or raise its generation");
  }
  if (len == known) return;
  const py::object part = tail(ids, known, len);
  const Py_ssize_t skip = PySequence_Fast_GET_SIZE(part.ptr()) - (len - known);
  for (Py_ssize_t i = 0; i < len - known; ++i) {
    const long id = PyLong_AsLong(PySequence_Fast_GET_ITEM(part.ptr(), skip + i));
    if (id == -1 && PyErr_Occurred()) throw py::error_already_set();
    if (id < 0 || id > kMaxTokenId) {
      refuse("row " + std::to_string(row) + " has token id " + std::to_string(id) + " at position " +
             std::to_string(known + i) + ", valid ids are 0 to " + std::to_string(kMaxTokenId));
    }
    index.append(static_cast<std::int32_t>(id));
  }
}

void settle(NgramRows&, RowIndex&) {}
void settle(SuffixRows& rows, SuffixRow& row) { rows.settle(row); }

template <class Rows>
void observe(Rows& rows, const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& generations,
             const py::sequence& token_ids) {
  if (ids.size() != generations.size() || ids.size() != token_ids.size()) {
    refuse("rows, generations and token_ids must be of one length");
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const py::object row_ids = token_ids[i];
    auto& index = rows.open(ids[i], generations[i]);
    append_new(index, ids[i], row_ids);
    settle(rows, index);
  }
}

int propose_row(NgramRows& rows, std::int64_t row, std::int64_t generation, int max_len, std::int32_t* out) {
  const RowIndex* index = rows.find(row, generation);
  return index == nullptr ? 0 : index->propose(max_len, out);
}

int propose_row(SuffixRows& rows, std::int64_t row, std::int64_t generation, int max_len, std::int32_t* out) {
  SuffixRow* index = rows.find(row, generation);
  return index == nullptr ? 0 : rows.propose(*index, max_len, out);
}

template <class Rows>
py::list propose(Rows& rows, const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& generations,
                 const std::vector<int>& max_lens) {
  if (ids.size() != generations.size() || ids.size() != max_lens.size()) {
    refuse("rows, generations and max_lens must be of one length");
  }
  py::list drafts(ids.size());
  std::vector<std::int32_t> out;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    out.resize(static_cast<std::size_t>(max_lens[i] > 0 ? max_lens[i] : 0));
    const int len = propose_row(rows, ids[i], generations[i], max_lens[i], out.data());
    py::list draft(len);
    for (int j = 0; j < len; ++j) draft[static_cast<std::size_t>(j)] = py::int_(out[static_cast<std::size_t>(j)]);
    drafts[i] = std::move(draft);
  }
  return drafts;
}

template <class Rows>
void forget(Rows& rows, const std::vector<std::int64_t>& ids) {
  for (const std::int64_t row : ids) rows.forget(row);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("build_id") = LAMELLA_BUILD_ID;

  py::class_<NgramRows>(m, "NgramIndex")
      .def(py::init([](int min_len, int max_len, bool earliest) {
             if (min_len < 1 || max_len < min_len || max_len > lamella::specdec::kMaxNgram) {
               refuse("n-gram lengths must satisfy 1 <= min <= max <= " +
                      std::to_string(lamella::specdec::kMaxNgram) + ", got " + std::to_string(min_len) + " and " +
                      std::to_string(max_len));
             }
             return NgramRows(NgramRule{min_len, max_len, earliest});
           }),
           py::arg("min_len"), py::arg("max_len"), py::arg("earliest"))
      .def("observe", &observe<NgramRows>, py::arg("rows"), py::arg("generations"), py::arg("token_ids"))
      .def("propose", &propose<NgramRows>, py::arg("rows"), py::arg("generations"), py::arg("max_lens"))
      .def("forget", &forget<NgramRows>, py::arg("rows"))
      .def("__len__", &NgramRows::size);

  py::class_<SuffixRows>(m, "SuffixIndex")
      .def(py::init([](int max_tree_depth, std::size_t max_cached_requests, std::size_t max_cached_tokens,
                       double max_spec_factor, double max_spec_offset, double min_token_prob) {
             if (max_tree_depth < 2 || max_tree_depth > lamella::specdec::kMaxTreeDepth) {
               refuse("max_tree_depth must be 2 to " + std::to_string(lamella::specdec::kMaxTreeDepth) + ", got " +
                      std::to_string(max_tree_depth));
             }
             return SuffixRows(SuffixRule{max_tree_depth, max_cached_requests, max_cached_tokens, max_spec_factor,
                                          max_spec_offset, min_token_prob});
           }),
           py::arg("max_tree_depth"), py::arg("max_cached_requests"), py::arg("max_cached_tokens"),
           py::arg("max_spec_factor"), py::arg("max_spec_offset"), py::arg("min_token_prob"))
      .def("observe", &observe<SuffixRows>, py::arg("rows"), py::arg("generations"), py::arg("token_ids"))
      .def("propose", &propose<SuffixRows>, py::arg("rows"), py::arg("generations"), py::arg("max_lens"))
      .def("forget", &forget<SuffixRows>, py::arg("rows"))
      .def_property_readonly("num_cached_requests", &SuffixRows::num_cached_requests)
      .def_property_readonly("num_cached_tokens", &SuffixRows::num_cached_tokens)
      .def_property_readonly("num_nodes", &SuffixRows::num_nodes)
      .def("__len__", &SuffixRows::size);
}
