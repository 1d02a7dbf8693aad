#include "ngram/ngram_index.h"

#include <algorithm>

namespace lamella::specdec {
namespace {

constexpr std::size_t kFirstCapacity = 16;

// One more id on the left of an n-gram. Multiply and fold: every bit of the id reaches the low half.
std::uint64_t mix(std::uint64_t hash, std::int32_t id) {
  hash = (hash ^ static_cast<std::uint32_t>(id)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace

NgramTable::NgramTable(int len) : len_(len), entries_(kFirstCapacity, Entry{0, 0}) {}

std::size_t NgramTable::slot_of(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash) const {
  const std::size_t mask = entries_.size() - 1;
  const std::int32_t* key = ids.data() + end - len_;
  for (std::size_t slot = hash & mask;; slot = (slot + 1) & mask) {
    const Entry& entry = entries_[slot];
    if (entry.end == 0) return slot;
    if (entry.hash == hash && std::equal(key, key + len_, ids.data() + entry.end - len_)) return slot;
  }
}

std::uint32_t NgramTable::find(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash) const {
  return entries_[slot_of(ids, end, hash)].end;
}

void NgramTable::record(const std::vector<std::int32_t>& ids, std::size_t end, std::uint32_t hash, bool keep_first) {
  Entry& entry = entries_[slot_of(ids, end, hash)];
  if (entry.end != 0) {
    if (!keep_first) entry.end = static_cast<std::uint32_t>(end);
    return;
  }
  entry = Entry{hash, static_cast<std::uint32_t>(end)};
  ++num_used_;
  if (num_used_ * 4 > entries_.size() * 3) grow();
}

void NgramTable::grow() {
  std::vector<Entry> old(entries_.size() * 2, Entry{0, 0});
  old.swap(entries_);
  const std::size_t mask = entries_.size() - 1;
  for (const Entry& entry : old) {
    if (entry.end == 0) continue;
    std::size_t slot = entry.hash & mask;
    while (entries_[slot].end != 0) slot = (slot + 1) & mask;
    entries_[slot] = entry;
  }
}

RowIndex::RowIndex(const NgramRule& rule, std::int64_t generation) : rule_(rule), generation_(generation) {
  for (int len = rule.min_len; len <= rule.max_len; ++len) tables_.emplace_back(len);
}

int RowIndex::longest_at(std::size_t end) const {
  return static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(rule_.max_len), end));
}

void RowIndex::hash_ending_at(std::size_t end, int longest, std::uint32_t* hashes) const {
  std::uint64_t hash = 0;
  for (int n = 1; n <= longest; ++n) {
    hash = mix(hash, ids_[end - n]);
    hashes[n - 1] = static_cast<std::uint32_t>(hash);
  }
}

void RowIndex::append(std::int32_t id) {
  const std::size_t end = ids_.size();
  const int longest = longest_at(end);
  if (longest >= rule_.min_len) {
    std::uint32_t hashes[kMaxNgram];
    hash_ending_at(end, longest, hashes);
    for (int n = rule_.min_len; n <= longest; ++n) {
      tables_[n - rule_.min_len].record(ids_, end, hashes[n - 1], rule_.earliest);
    }
  }
  ids_.push_back(id);
}

int RowIndex::propose(int max_len, std::int32_t* out) const {
  const std::size_t end = ids_.size();
  const int longest = longest_at(end);
  if (max_len <= 0 || longest < rule_.min_len) return 0;
  std::uint32_t hashes[kMaxNgram];
  hash_ending_at(end, longest, hashes);
  for (int n = longest; n >= rule_.min_len; --n) {
    const std::size_t match_end = tables_[n - rule_.min_len].find(ids_, end, hashes[n - 1]);
    if (match_end == 0) continue;
    for (int i = 0; i < max_len; ++i) {
      const std::size_t from = match_end + static_cast<std::size_t>(i);
      out[i] = from < end ? ids_[from] : out[from - end];
    }
    return max_len;
  }
  return 0;
}

const RowIndex* NgramRows::find(std::int64_t row, std::int64_t generation) const {
  const auto found = rows_.find(row);
  return found != rows_.end() && found->second.generation() == generation ? &found->second : nullptr;
}

RowIndex& NgramRows::open(std::int64_t row, std::int64_t generation) {
  auto found = rows_.find(row);
  if (found != rows_.end() && found->second.generation() != generation) {
    rows_.erase(found);
    found = rows_.end();
  }
  if (found == rows_.end()) found = rows_.emplace(row, RowIndex(rule_, generation)).first;
  return found->second;
}

}  // namespace lamella::specdec
