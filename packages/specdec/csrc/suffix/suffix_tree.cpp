#include "suffix/suffix_tree.h"

#include <algorithm>
#include <cassert>

namespace lamella::specdec {
namespace {

constexpr std::int32_t kSeparator = -1;
constexpr std::size_t kFirstCapacity = 64;
// A text's dropped front is given back once it is this long and half of all.
constexpr std::size_t kMinDropped = 4096;

}  // namespace

SuffixTree::SuffixTree(int max_depth)
    : max_depth_(max_depth), nodes_(1, Node{kSeparator, 0, 0, 0, 0, 0, 0, 0, 0}), slots_(kFirstCapacity, 0) {}

void SuffixTree::append(std::int32_t id) {
  text_.push_back(id);
  const std::uint64_t end = base_ + text_.size();
  std::uint32_t parent = 0;
  std::size_t num_known = 0;
  const std::size_t num_open = matches_.size();
  for (std::size_t len = 0; len <= num_open; ++len) {
    const std::uint32_t next_parent = len < num_open ? matches_[len] : 0;  // read before its place is written
    const std::uint32_t child = find(parent, id);
    if (child == 0) {
      add_child(parent, id, end);
    } else {
      const bool deeper = static_cast<int>(len) + 1 < max_depth_;
      if (deeper && once(nodes_[child])) {
        // its first occurrence goes on one id deeper by itself from now on
        const std::uint64_t first_end = nodes_[child].last;
        const std::int32_t follower = at(first_end);
        if (follower != kSeparator) add_child(child, follower, first_end + 1);
      }
      Node& node = nodes_[child];
      ++node.count;
      node.last = end;
      Node& above = nodes_[parent];
      ++above.followed;
      if (node.count >= nodes_[above.best].count) above.best = child;
      if (deeper) {
        if (num_known < num_open) {
          matches_[num_known] = child;
        } else {
          matches_.push_back(child);
        }
        ++num_known;
      }
    }
    parent = next_parent;
  }
  matches_.resize(num_known);
}

void SuffixTree::close() {
  text_.push_back(kSeparator);
  matches_.clear();
}

std::size_t SuffixTree::drop_oldest() {
  std::size_t end = front_;
  while (text_[end] != kSeparator) ++end;
  const std::size_t len = end - front_;
  for (std::size_t from = front_; from < end; ++from) drop_windows_at(from);
  front_ = end + 1;
  if (front_ >= kMinDropped && front_ * 2 >= text_.size()) {
    text_.erase(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(front_));
    base_ += front_;
    front_ = 0;
  }
  return len;
}

void SuffixTree::drop_windows_at(std::size_t from) {
  std::uint32_t path[kMaxTreeDepth];
  int depth = 0;
  std::uint32_t parent = 0;
  while (depth < max_depth_ && text_[from + static_cast<std::size_t>(depth)] != kSeparator) {
    const std::uint32_t child = find(parent, text_[from + static_cast<std::size_t>(depth)]);
    assert(child != 0);
    path[depth++] = child;
    if (once(nodes_[child])) break;  // the rest has no nodes
    parent = child;
  }
  for (int i = depth - 1; i >= 0; --i) {
    const std::uint32_t child = path[i];
    const std::uint32_t above = nodes_[child].parent;
    --nodes_[above].followed;
    if (--nodes_[child].count == 0) {
      remove(child);
    } else if (nodes_[above].best == child) {
      choose_best(above);
    }
  }
}

void SuffixTree::advance(std::vector<Cursor>& cursors, std::int32_t id) const {
  const std::size_t longest = static_cast<std::size_t>(max_depth_ - 1);
  if (cursors.size() < longest) cursors.push_back(Cursor{0, 0, 0});
  // the window of length n + 1 is the one of length n and the id
  for (std::size_t n = cursors.size(); n-- > 1;) cursors[n] = cursors[n - 1];
  cursors[0] = Cursor{0, 0, 0};
  std::size_t num_known = 0;
  while (num_known < cursors.size() && step(cursors[num_known], id)) ++num_known;
  cursors.resize(num_known);
}

void SuffixTree::refresh(std::vector<Cursor>& cursors, const std::int32_t* end, std::size_t max_len) const {
  std::size_t num_known = 0;
  while (num_known < cursors.size() && stands(cursors[num_known], end)) ++num_known;
  cursors.resize(num_known);
  // where a window does not occur, no longer one does
  for (std::size_t len = num_known + 1; len <= max_len; ++len) {
    Cursor cursor{0, 0, 0};
    for (const std::int32_t* id = end - len; id != end; ++id) {
      if (!step(cursor, *id)) return;
    }
    cursors.push_back(cursor);
  }
}

bool SuffixTree::stands(Cursor& cursor, const std::int32_t* end) const {
  if (life_of(cursor.node) != cursor.life) return false;
  // the one text behind the node may be another by now, and may have got nodes
  const std::int32_t* id = end - cursor.ahead;
  for (cursor.ahead = 0; id != end; ++id) {
    if (!step(cursor, *id)) return false;
  }
  return true;
}

double SuffixTree::follow(Cursor from, int depth, int max_len, double min_prob, std::int32_t* out, int* len) const {
  double prob = 1.0;
  double score = 0.0;
  *len = 0;
  for (; *len < max_len && depth < max_depth_; ++depth) {
    const Node& node = nodes_[from.node];
    std::int32_t id;
    if (from.ahead > 0 || once(node)) {
      id = at(node.last + from.ahead++);
      if (id == kSeparator) break;
    } else {
      if (node.best == 0) break;
      const Node& best = nodes_[node.best];
      prob *= static_cast<double>(best.count) / static_cast<double>(node.followed);
      id = best.id;
      from.node = node.best;
    }
    if (prob < min_prob) break;
    out[(*len)++] = id;
    score += prob;
  }
  return score;
}

bool SuffixTree::step(Cursor& cursor, std::int32_t id) const {
  const Node& node = nodes_[cursor.node];
  if (cursor.ahead > 0 || once(node)) {
    if (at(node.last + cursor.ahead) != id) return false;
    ++cursor.ahead;
    return true;
  }
  const std::uint32_t child = find(cursor.node, id);
  if (child == 0) return false;
  cursor.node = child;
  cursor.life = life_of(child);
  return true;
}

std::int32_t SuffixTree::at(std::uint64_t position) const {
  const std::size_t i = static_cast<std::size_t>(position - base_);
  return i < text_.size() ? text_[i] : kSeparator;
}

std::uint32_t SuffixTree::add_child(std::uint32_t parent, std::int32_t id, std::uint64_t last) {
  std::uint32_t child = free_;
  const Node made{id, parent, 1, 0, last, 0, 0, nodes_[parent].children, 0};
  if (child != 0) {
    free_ = nodes_[child].next;
    --num_free_;
    nodes_[child] = made;
  } else {
    child = static_cast<std::uint32_t>(nodes_.size());
    nodes_.push_back(made);
  }
  Node& above = nodes_[parent];
  if (above.children != 0) nodes_[above.children].previous = child;
  above.children = child;
  ++above.followed;
  if (above.best == 0 || nodes_[above.best].count <= 1) above.best = child;
  slots_[slot_of(parent, id)] = child;
  if (num_nodes() * 4 > slots_.size() * 3) grow();
  return child;
}

void SuffixTree::remove(std::uint32_t node) {
  Node& gone = nodes_[node];
  erase_slot(slot_of(gone.parent, gone.id));
  Node& above = nodes_[gone.parent];
  if (gone.next != 0) nodes_[gone.next].previous = gone.previous;
  if (gone.previous != 0) {
    nodes_[gone.previous].next = gone.next;
  } else {
    above.children = gone.next;
  }
  if (above.best == node) choose_best(gone.parent);
  gone.next = free_;
  free_ = node;
  if (lives_.size() <= node) lives_.resize(nodes_.size(), 0);
  ++lives_[node];
  ++num_free_;
}

void SuffixTree::choose_best(std::uint32_t parent) {
  if (parent == 0) {  // nothing follows the empty window: its many children need no order
    nodes_[0].best = 0;
    return;
  }
  std::uint32_t best = nodes_[parent].children;
  for (std::uint32_t child = best; child != 0; child = nodes_[child].next) {
    const Node& one = nodes_[child];
    const Node& other = nodes_[best];
    if (one.count > other.count || (one.count == other.count && one.last > other.last)) best = child;
  }
  nodes_[parent].best = best;
}

std::uint32_t SuffixTree::find(std::uint32_t parent, std::int32_t id) const { return slots_[slot_of(parent, id)]; }

std::size_t SuffixTree::home_of(std::uint32_t parent, std::int32_t id) const {
  std::uint64_t hash = (static_cast<std::uint64_t>(parent) << 32) | static_cast<std::uint32_t>(id);
  hash = (hash ^ (hash >> 29)) * 0x9E3779B97F4A7C15ull;
  return static_cast<std::size_t>(hash ^ (hash >> 32)) & (slots_.size() - 1);
}

std::size_t SuffixTree::slot_of(std::uint32_t parent, std::int32_t id) const {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = home_of(parent, id);; slot = (slot + 1) & mask) {
    const std::uint32_t child = slots_[slot];
    if (child == 0 || (nodes_[child].parent == parent && nodes_[child].id == id)) return slot;
  }
}

void SuffixTree::erase_slot(std::size_t slot) {
  const std::size_t mask = slots_.size() - 1;
  slots_[slot] = 0;
  // entries behind the gap that were pushed past it move back into it
  for (std::size_t next = (slot + 1) & mask; slots_[next] != 0; next = (next + 1) & mask) {
    const Node& node = nodes_[slots_[next]];
    const std::size_t home = home_of(node.parent, node.id);
    if (((next - home) & mask) < ((next - slot) & mask)) continue;
    slots_[slot] = slots_[next];
    slots_[next] = 0;
    slot = next;
  }
}

void SuffixTree::grow() {
  std::vector<std::uint32_t> old(slots_.size() * 2, 0);
  old.swap(slots_);
  for (const std::uint32_t child : old) {
    if (child != 0) slots_[slot_of(nodes_[child].parent, nodes_[child].id)] = child;
  }
}

}  // namespace lamella::specdec
