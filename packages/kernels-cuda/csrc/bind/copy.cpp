#include "copy/copy_blocks.h"

#include <optional>

#include <pybind11/stl.h>

#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

void copy_blocks(const TensorView& sources, const TensorView& targets, const std::optional<TensorView>& sizes,
                 int64_t bytes, int max_blocks) {
  check_contiguous(sources, "src_ptrs", {DType::i64}, {-1});
  check_contiguous(targets, "dst_ptrs", {DType::i64}, {sources.shape[0]});
  check_same_device(targets, "dst_ptrs", sources);
  if (sizes) {
    check_contiguous(*sizes, "num_bytes", {DType::i64}, {sources.shape[0]});
    check_same_device(*sizes, "num_bytes", sources);
  }
  require(bytes >= 0, sizes ? "max_bytes" : "num_bytes", "is negative");
  require(max_blocks > 0, "max_blocks", "must be 1 at least");
  const OnDevice on(sources);
  succeed(lamella_copy_blocks(sources.as<int64_t>(), targets.as<int64_t>(), sizes ? sizes->as<int64_t>() : nullptr,
                              sources.shape[0], bytes, max_blocks, on.stream),
          "copy_blocks");
}

// Addresses as numbers: pinned host memory is no device tensor. The caller has checked them.
void copy_pairs(uintptr_t source, uintptr_t target, const TensorView& pairs, int64_t bytes, int64_t source_stride,
                int64_t target_stride, int max_blocks) {
  check_contiguous(pairs, "pairs", {DType::i64}, {-1, 2});
  check_aligned(pairs, "pairs");
  require(max_blocks > 0, "max_blocks", "must be 1 at least");
  const OnDevice on(pairs);
  succeed(lamella_copy_pairs(reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target),
                             pairs.as<int64_t>(), pairs.shape[0], bytes, source_stride, target_stride, max_blocks,
                             on.stream),
          "copy_block_pairs");
}

}  // namespace

void bind_copy(py::module_& m) {
  m.def("copy_blocks", &copy_blocks, py::arg("src_ptrs"), py::arg("dst_ptrs"), py::arg("sizes"), py::arg("bytes"),
        py::arg("max_blocks"));
  m.def("copy_pairs", &copy_pairs, py::arg("source"), py::arg("target"), py::arg("pairs"), py::arg("bytes"),
        py::arg("source_stride"), py::arg("target_stride"), py::arg("max_blocks"));
}

}  // namespace lamella::bind
