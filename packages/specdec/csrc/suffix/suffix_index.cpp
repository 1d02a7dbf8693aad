#include "suffix/suffix_index.h"

#include <algorithm>
#include <cmath>

namespace lamella::specdec {

SuffixRow* SuffixRows::find(std::int64_t row, std::int64_t generation) {
  const auto found = rows_.find(row);
  return found != rows_.end() && found->second.generation == generation ? &found->second : nullptr;
}

SuffixRow& SuffixRows::open(std::int64_t row, std::int64_t generation) {
  SuffixRow* known = find(row, generation);
  if (known != nullptr) return *known;
  forget(row);
  return rows_.emplace(row, SuffixRow(rule_.max_tree_depth, generation)).first->second;
}

void SuffixRows::settle(SuffixRow& row) {
  if (row.started || row.size() == 0) return;
  row.started = true;
  row.prompt_len = row.size();
}

void SuffixRows::forget(std::int64_t row) {
  const auto found = rows_.find(row);
  if (found == rows_.end()) return;
  keep_output(found->second);
  rows_.erase(found);
}

void SuffixRows::keep_output(const SuffixRow& row) {
  const std::size_t end = row.size();
  const std::size_t start = row.started ? std::max(row.prompt_len, end - std::min(end, rule_.max_cached_tokens)) : end;
  const std::size_t len = end - start;
  if (rule_.max_cached_requests == 0 || len < 2) return;  // of a single id nothing is learnt
  while (num_requests_ > 0 &&
         (num_requests_ >= rule_.max_cached_requests || num_tokens_ + len > rule_.max_cached_tokens)) {
    num_tokens_ -= finished_.drop_oldest();
    --num_requests_;
  }
  for (std::size_t i = start; i < end; ++i) finished_.append(row.tree.id_at(i));
  finished_.close();
  num_tokens_ += len;
  ++num_requests_;
  ++epoch_;
}

void SuffixRows::follow_finished(SuffixRow& row) const {
  const std::size_t end = row.size();
  const std::size_t longest = static_cast<std::size_t>(rule_.max_tree_depth - 1);
  if (end - row.cursors_len >= longest) {
    row.cursors.clear();
    row.cursors_len = end - std::min(end, longest);
  } else if (row.cursors_epoch != epoch_) {
    finished_.refresh(row.cursors, row.tree.ids() + row.cursors_len, std::min(row.cursors_len, longest));
  }
  row.cursors_epoch = epoch_;
  for (; row.cursors_len < end; ++row.cursors_len) finished_.advance(row.cursors, row.tree.id_at(row.cursors_len));
}

int SuffixRows::budget(std::size_t match_len, int max_len) const {
  const double allowed = std::floor(static_cast<double>(match_len) * rule_.max_spec_factor + rule_.max_spec_offset);
  return allowed >= static_cast<double>(max_len) ? max_len : std::max(0, static_cast<int>(allowed));
}

int SuffixRows::propose(SuffixRow& row, int max_len, std::int32_t* out) {
  if (max_len <= 0) return 0;
  std::int32_t drafts[kMaxTreeDepth];
  int best_len = 0;
  double best_score = 0.0;
  const auto consider = [&](const SuffixTree& tree, SuffixTree::Cursor from, std::size_t match_len, bool wins_ties) {
    int len = 0;
    const int allowed = budget(match_len, max_len);
    const double score =
        tree.follow(from, static_cast<int>(match_len), allowed, rule_.min_token_prob, drafts, &len);
    if (len == 0 || score < best_score || (score == best_score && !wins_ties)) return;
    best_score = score;
    best_len = len;
    std::copy(drafts, drafts + len, out);
  };
  const std::vector<std::uint32_t>& own = row.tree.matches();
  for (std::size_t n = 1; n <= own.size(); ++n) consider(row.tree, SuffixTree::Cursor{own[n - 1], 0, 0}, n, true);
  if (num_requests_ == 0) return best_len;
  follow_finished(row);
  // the row's own text wins a tie with others', the longer of two matches a tie within one tree
  const double own_score = best_score;
  for (std::size_t n = 1; n <= row.cursors.size(); ++n) {
    consider(finished_, row.cursors[n - 1], n, best_score > own_score);
  }
  return best_len;
}

std::size_t SuffixRows::num_nodes() const {
  std::size_t num_nodes = finished_.num_nodes();
  for (const auto& [number, row] : rows_) num_nodes += row.tree.num_nodes();
  return num_nodes;
}

}  // namespace lamella::specdec
