#include <vector>

#include <pybind11/stl.h>

#include "batch/decode_rows.h"
#include "bind/families.h"
#include "bind/stream.h"

namespace py = pybind11;

namespace lamella::bind {
namespace {

using abi::DType;
using abi::TensorView;

// rows [batch] and the state of num_rows rows.
void check_rows(const TensorView& rows, const TensorView& token_ids, const TensorView& computed_len) {
  check_contiguous(rows, "rows", {DType::i32}, {-1});
  check(token_ids, "token_ids", {DType::i32}, {-1, -1});
  check_contiguous(computed_len, "computed_len", {DType::i32}, {token_ids.shape[0]});
  check_same_device(token_ids, "token_ids", rows);
  check_same_device(computed_len, "computed_len", rows);
}

int32_t* check_numbers(const TensorView& out, const char* name, const TensorView& rows) {
  check_contiguous(out, name, {DType::i32}, {rows.shape[0]});
  check_same_device(out, name, rows);
  return out.as<int32_t>();
}

void prepare_decode(const TensorView& rows, const TensorView& token_ids, const TensorView& computed_len,
                    const std::vector<TensorView>& tables, int64_t block_size, int64_t spare_row, const TensorView& ids,
                    const TensorView& positions, const TensorView& seq_lens, const std::vector<TensorView>& slots,
                    const std::vector<TensorView>& block_tables) {
  check_rows(rows, token_ids, computed_len);
  const int64_t batch = rows.shape[0], num_rows = token_ids.shape[0];
  require(!tables.empty() && tables.size() <= kMaxTableGroups, "tables",
          "are " + std::to_string(tables.size()) + ", needed 1 to " + std::to_string(kMaxTableGroups));
  require(slots.size() == tables.size(), "slots", "are not as many as tables");
  require(block_tables.size() == tables.size(), "block_tables", "are not as many as tables");
  require(block_size >= 1 && block_size <= INT32_MAX, "block_size", "is not between 1 and 2^31 - 1");

  LamellaPrepareDecode what = {};
  what.rows = rows.as<int32_t>();
  what.token_ids = token_ids.as<int32_t>();
  what.computed_len = computed_len.as<int32_t>();
  what.ids = check_numbers(ids, "ids", rows);
  what.positions = check_numbers(positions, "positions", rows);
  what.seq_lens = check_numbers(seq_lens, "seq_lens", rows);
  for (size_t g = 0; g < tables.size(); ++g) {
    const auto called = [g](const char* list) { return list + ("[" + std::to_string(g)) + "]"; };
    const std::string table = called("tables"), slot = called("slots"), block_table = called("block_tables");
    check(tables[g], table.c_str(), {DType::i32}, {num_rows, -1});
    check_contiguous(slots[g], slot.c_str(), {DType::i64}, {batch});
    check(block_tables[g], block_table.c_str(), {DType::i32}, {batch, tables[g].shape[1]});
    check_same_device(tables[g], table.c_str(), rows);
    check_same_device(slots[g], slot.c_str(), rows);
    check_same_device(block_tables[g], block_table.c_str(), rows);
    what.tables[g] = tables[g].as<int32_t>();
    what.slots[g] = slots[g].as<int64_t>();
    what.block_tables[g] = block_tables[g].as<int32_t>();
    what.max_blocks[g] = tables[g].shape[1];
    what.table_strides[g] = tables[g].strides[0];
    what.block_table_strides[g] = block_tables[g].strides[0];
  }
  what.batch = batch;
  what.num_rows = num_rows;
  what.width = token_ids.shape[1];
  what.token_stride = token_ids.strides[0];
  what.block_size = block_size;
  what.spare_row = spare_row;
  what.num_groups = static_cast<int32_t>(tables.size());
  const OnDevice on(rows);
  succeed(lamella_prepare_decode(&what, on.stream), "prepare_decode");
}

void advance_decode(const TensorView& rows, const TensorView& computed_len, const TensorView& token_ids,
                    const TensorView& next_ids, int64_t spare_row) {
  check_rows(rows, token_ids, computed_len);
  const int32_t* next = check_numbers(next_ids, "next_ids", rows);
  const OnDevice on(rows);
  succeed(lamella_advance_decode(rows.as<int32_t>(), computed_len.as<int32_t>(), token_ids.as<int32_t>(), next,
                                 rows.shape[0], token_ids.shape[0], token_ids.shape[1], token_ids.strides[0], spare_row,
                                 on.stream),
          "advance_decode");
}

}  // namespace

void bind_batch(py::module_& m) {
  m.def("prepare_decode", &prepare_decode, py::arg("rows"), py::arg("token_ids"), py::arg("computed_len"),
        py::arg("tables"), py::arg("block_size"), py::arg("spare_row"), py::arg("ids"), py::arg("positions"),
        py::arg("seq_lens"), py::arg("slots"), py::arg("block_tables"));
  m.def("advance_decode", &advance_decode, py::arg("rows"), py::arg("computed_len"), py::arg("token_ids"),
        py::arg("next_ids"), py::arg("spare_row"));
}

}  // namespace lamella::bind
