// The algorithm of thrifty.graph's frontier sampler in C++, to see what compiling Python by numba
// costs: three passes a hop (choose, read, relabel), prefetching, Floyd's algorithm, a dense stamped
// table.
#include <cstdint>
#include <algorithm>

namespace {
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr int64_t kRowsAhead = 16, kEdgesAhead = 32, kTableAhead = 24;

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline int64_t below(uint64_t word, int64_t bound) {
  if (bound < (1 << 16)) return static_cast<int64_t>(((word >> 32) * static_cast<uint64_t>(bound)) >> 32);
  return static_cast<int64_t>(static_cast<double>(word >> 11) * 0x1p-53 * static_cast<double>(bound));
}

inline void floyd(int64_t* picks, int64_t num, int64_t low, int64_t degree, uint64_t state) {
  uint64_t seen = 0;
  for (int64_t n = 0; n < num; ++n) {
    const int64_t last = degree - num + n;
    state += kGolden;
    int64_t pick = below(mix(state), last + 1);
    uint64_t bit = uint64_t{1} << (pick & 63);
    if (seen & bit) {
      const bool taken = degree <= 64 || std::find(picks, picks + n, low + pick) != picks + n;
      if (taken) {
        pick = last;
        bit = uint64_t{1} << (pick & 63);
      }
    }
    seen |= bit;
    picks[n] = low + pick;
  }
}
}  // namespace

// Sample hop after hop. The nodes begin with num_seeds distinct seeds that are already in the table.
// counts receives the numbers of nodes, edges and rows.
extern "C" void sample(const int64_t* indptr, const int32_t* indices, const int64_t* fanouts, int64_t num_hops,
                       const uint64_t* keys, uint32_t* table, uint32_t stamp, uint32_t bits, int64_t* nodes,
                       int64_t num_seeds, int64_t* picks, int32_t* found, int32_t* starts, int32_t* edges,
                       int64_t* counts) {
  const uint32_t mark = stamp << bits, mask = (uint32_t{1} << bits) - 1;
  int64_t num_nodes = 0, num_edges = 0, first = 0, row = 0;
  for (int64_t i = 0; i < num_seeds; ++i) table[nodes[i]] = mark | static_cast<uint32_t>(num_nodes++);
  starts[0] = 0;
  for (int64_t hop = 0; hop < num_hops; ++hop) {
    const int64_t end = num_nodes, fanout = fanouts[hop];
    int64_t num = 0;
    for (int64_t i = first; i < end; ++i, ++row) {
      if (i + kRowsAhead < end) __builtin_prefetch(indptr + nodes[i + kRowsAhead]);
      const int64_t low = indptr[nodes[i]], degree = indptr[nodes[i] + 1] - low;
      const int64_t taken = std::min(degree, fanout);
      if (taken == degree)
        for (int64_t n = 0; n < taken; ++n) picks[num + n] = low + n;
      else
        floyd(picks + num, taken, low, degree, mix(keys[hop] + static_cast<uint64_t>(i - first) * kGolden));
      num += taken;
      starts[row + 1] = static_cast<int32_t>(num_edges + num);
    }
    for (int64_t e = 0; e < num; ++e) {
      if (e + kEdgesAhead < num) __builtin_prefetch(indices + picks[e + kEdgesAhead]);
      found[e] = indices[picks[e]];
    }
    for (int64_t e = 0; e < num; ++e) {
      if (e + kTableAhead < num) __builtin_prefetch(table + found[e + kTableAhead]);
      const int32_t node = found[e];
      const uint32_t entry = table[node];
      if ((entry & ~mask) == mark) {
        edges[num_edges + e] = static_cast<int32_t>(entry & mask);
      } else {
        table[node] = mark | static_cast<uint32_t>(num_nodes);
        nodes[num_nodes] = node;
        edges[num_edges + e] = static_cast<int32_t>(num_nodes++);
      }
    }
    num_edges += num;
    first = end;
  }
  counts[0] = num_nodes;
  counts[1] = num_edges;
  counts[2] = row;
}
