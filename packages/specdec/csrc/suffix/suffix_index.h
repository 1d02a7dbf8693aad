// Rows and finished outputs as suffix trees: what lamella/specdec/drafters/suffix_index.py does, natively.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "suffix/suffix_tree.h"

namespace lamella::specdec {

struct SuffixRule {
  int max_tree_depth;
  std::size_t max_cached_requests;  // 0: finished outputs are not kept
  std::size_t max_cached_tokens;
  double max_spec_factor;
  double max_spec_offset;
  double min_token_prob;
};

// One row: a tree of its own ids, and where its end occurs in the tree of finished outputs.
class SuffixRow {
 public:
  SuffixRow(int max_depth, std::int64_t owner) : generation(owner), tree(max_depth) {}

  std::size_t size() const { return tree.size(); }
  void append(std::int32_t id) { tree.append(id); }

  std::int64_t generation;
  SuffixTree tree;
  bool started = false;
  std::size_t prompt_len = 0;  // ids of the first observation: what comes behind them is output

  // Lag behind: brought up to date where drafts are wanted.
  std::vector<SuffixTree::Cursor> cursors;
  std::uint64_t cursors_epoch = 0;
  std::size_t cursors_len = 0;
};

// All rows, and the finished outputs: of the newest max_cached_requests as many as fit max_cached_tokens.
class SuffixRows {
 public:
  explicit SuffixRows(const SuffixRule& rule) : rule_(rule), finished_(rule.max_tree_depth) {}

  // The row if it is known in this generation, else null.
  SuffixRow* find(std::int64_t row, std::int64_t generation);
  // The same, made empty if the row is unknown or of another generation, whose output then is finished.
  SuffixRow& open(std::int64_t row, std::int64_t generation);
  // Ends an observation of the row.
  void settle(SuffixRow& row);
  // Drops the row; its output is finished.
  void forget(std::int64_t row);

  // Writes at most max_len drafts to out. Returns how many.
  int propose(SuffixRow& row, int max_len, std::int32_t* out);

  std::size_t size() const { return rows_.size(); }
  std::size_t num_cached_requests() const { return num_requests_; }
  std::size_t num_cached_tokens() const { return num_tokens_; }
  std::size_t num_nodes() const;

 private:
  void keep_output(const SuffixRow& row);
  void follow_finished(SuffixRow& row) const;
  int budget(std::size_t match_len, int max_len) const;

  SuffixRule rule_;
  std::unordered_map<std::int64_t, SuffixRow> rows_;
  SuffixTree finished_;
  std::size_t num_requests_ = 0;
  std::size_t num_tokens_ = 0;
  std::uint64_t epoch_ = 1;  // raised whenever finished_ changes: cursors of before are to be refreshed
};

}  // namespace lamella::specdec
