// The n-grams of token rows, indexed as they grow: what lamella/specdec/drafters/ngram_index.py does, natively.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace lamella::specdec {

constexpr int kMaxNgram = 64;

// Which n-grams are indexed, and which of several occurrences counts.
struct NgramRule {
  int min_len;
  int max_len;
  bool earliest;
};

// Open-addressed map from the n-grams of one length to where they occur. It holds no tokens: a key is the pair of its
// hash and the n ids that end at `end`, compared in the row itself, so that a hash collision never changes a result.
class NgramTable {
 public:
  explicit NgramTable(int len);

  // Where the n-gram ids[end - len, end) was recorded (one behind its last token), or 0.
  std::uint32_t find(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash) const;

  // Records the n-gram ids[end - len, end); one already there is moved to `end` unless `keep_first`.
  void record(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash, bool keep_first);

 private:
  struct Entry {
    std::uint32_t hash;
    std::uint32_t end;  // 0: free
  };

  std::size_t slot_of(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash) const;
  void grow();

  int len_;
  std::size_t num_used_ = 0;
  std::vector<Entry> entries_;  // size is a power of two
};

// One row. ids_[0, size) are known; every n-gram that ends at or before size - 1 is recorded, so that the one at the
// very end of the row never finds itself.
class RowIndex {
 public:
  RowIndex(const NgramRule& rule, std::int64_t generation);

  std::int64_t generation() const { return generation_; }
  std::size_t size() const { return ids_.size(); }
  void append(std::int32_t id);

  // Writes what followed the longest earlier occurrence of the row's end to out[0, max_len). Returns max_len, or 0 if
  // no n-gram of the allowed lengths occurred before. Where the row ends inside the continuation, it goes on with the
  // drafts themselves: the end of a periodic row is drafted at full length.
  int propose(int max_len, std::int32_t* out) const;

 private:
  // hashes[n - 1] of the n-gram that ends at `end`, for n up to `longest`.
  void hash_ending_at(std::size_t end, int longest, std::uint32_t* hashes) const;
  int longest_at(std::size_t end) const;

  NgramRule rule_;
  std::int64_t generation_;
  std::vector<std::int32_t> ids_;
  std::vector<NgramTable> tables_;  // of lengths min_len .. max_len
};

// All rows by device row.
class NgramRows {
 public:
  explicit NgramRows(const NgramRule& rule) : rule_(rule) {}

  // The row's index if it is known in this generation, else null.
  const RowIndex* find(std::int64_t row, std::int64_t generation) const;
  // The same, made empty if the row is unknown or of another generation.
  RowIndex& open(std::int64_t row, std::int64_t generation);
  void forget(std::int64_t row) { rows_.erase(row); }
  std::size_t size() const { return rows_.size(); }

 private:
  NgramRule rule_;
  std::unordered_map<std::int64_t, RowIndex> rows_;
};

}  // namespace lamella::specdec
