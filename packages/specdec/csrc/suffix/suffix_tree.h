// How often every run of at most `max_depth` ids occurred in a set of sequences, and what followed it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lamella::specdec {

constexpr int kMaxTreeDepth = 128;

// A trie over all windows of the sequences, which grow one id at a time and leave oldest first.
//
//   text   a b c a b d ¦ a b x ¦         node "a b": count 3, followed by c, d and x, once each
//                └─┘ last                node "a b c": count 1, a leaf; what follows is read in the text: a b d
//
// A window that occurred once has no nodes below its first new id: its occurrence in the text says what follows, and the
// nodes come when it occurs again. So new text costs one node an id, and appending touches no more than the windows at
// the end of the sequence that occurred before, which are at most max_depth.
//
// Positions count all ids ever appended, separators included: they never repeat.
class SuffixTree {
 public:
  // A place in the tree: a node in one of its lives, or `ahead` ids into the text behind a node that occurred once.
  struct Cursor {
    std::uint32_t node;
    std::uint32_t ahead;
    std::uint32_t life;
  };

  explicit SuffixTree(int max_depth);

  int max_depth() const { return max_depth_; }
  // Ids held, separators included.
  std::size_t size() const { return text_.size() - front_; }
  std::size_t num_nodes() const { return nodes_.size() - num_free_ - 1; }
  // The id `i` of those held, counted from the oldest.
  std::int32_t id_at(std::size_t i) const { return text_[front_ + i]; }
  const std::int32_t* ids() const { return text_.data() + front_; }

  // Appends to the open sequence.
  void append(std::int32_t id);
  // Ends the open sequence.
  void close();
  // Drops the oldest sequence, which must be closed. Returns its length.
  std::size_t drop_oldest();

  // Nodes of the windows of length 1, 2, ... at the end of the open sequence that occurred before, below max_depth.
  const std::vector<std::uint32_t>& matches() const { return matches_; }
  // Moves every cursor on by one id, where cursors[n - 1] stands behind a window of length n, all lengths up to the
  // longest that occurs: a new one of length 1 comes, those that do not go on end.
  void advance(std::vector<Cursor>& cursors, std::int32_t id) const;
  // The same cursors after sequences have come and gone, behind the windows that end before `end`: those whose window is
  // gone end, and longer ones come, up to max_len, where their windows came.
  void refresh(std::vector<Cursor>& cursors, const std::int32_t* end, std::size_t max_len) const;

  // Follows the most frequent id (of equals the one seen last) from a place at depth `depth` for at most max_len ids, as
  // long as the product of the frequencies is at least min_prob. Writes the ids to out and returns the sum of the
  // products, which is the number of them that the past lets expect.
  double follow(Cursor from, int depth, int max_len, double min_prob, std::int32_t* out, int* len) const;

 private:
  struct Node {
    std::int32_t id;
    std::uint32_t parent;
    std::uint32_t count;     // occurrences
    std::uint32_t followed;  // occurrences that nodes below count
    std::uint64_t last;      // position behind the last occurrence
    std::uint32_t best;      // child with the highest (count, last); 0: none
    std::uint32_t children;  // head of their list; 0: none
    std::uint32_t next;      // in the parent's list, or in the list of free nodes
    std::uint32_t previous;
  };

  bool once(const Node& node) const { return node.count == 1 && node.followed == 0; }
  std::uint32_t life_of(std::uint32_t node) const { return node < lives_.size() ? lives_[node] : 0; }
  bool step(Cursor& cursor, std::int32_t id) const;
  // Whether the window that ends before `end` still occurs.
  bool stands(Cursor& cursor, const std::int32_t* end) const;
  // The id at a position, or a separator where the text ends.
  std::int32_t at(std::uint64_t position) const;

  std::uint32_t find(std::uint32_t parent, std::int32_t id) const;
  std::uint32_t add_child(std::uint32_t parent, std::int32_t id, std::uint64_t last);
  void remove(std::uint32_t node);
  void choose_best(std::uint32_t parent);
  // Forgets one occurrence of every window that starts at text_[from].
  void drop_windows_at(std::size_t from);

  std::size_t slot_of(std::uint32_t parent, std::int32_t id) const;
  std::size_t home_of(std::uint32_t parent, std::int32_t id) const;
  void erase_slot(std::size_t slot);
  void grow();

  int max_depth_;
  std::vector<Node> nodes_;  // 0 is the root
  std::uint32_t free_ = 0;
  std::size_t num_free_ = 0;
  std::vector<std::uint32_t> lives_;  // how often each node was removed, as far as any was
  std::vector<std::uint32_t> slots_;  // open-addressed from (parent, id) to the child; size is a power of two
  std::vector<std::int32_t> text_;    // [front_, size) are held
  std::size_t front_ = 0;
  std::uint64_t base_ = 0;  // position of text_[0]
  std::vector<std::uint32_t> matches_;
};

}  // namespace lamella::specdec
