// Count: say how many beans there are. A command for rlstack's SocketGame:
// g++ -std=c++17 -O2 count.cpp -o count
#include <iostream>
#include <random>

#include "rlstack_game.hpp"

int main() try {
  rlstack::Client client({{{"Player", 1, {}}, {"Bean", 3, {}}},
                          {},
                          {{"count", rlstack::Kind::categorical, 1, {"0", "1", "2", "3"}}}},
                         "count");
  std::mt19937_64 random(client.seed);
  while (true) {
    std::uint32_t beans = random() % 4;
    rlstack::Observation seen;
    seen.features = {{{}}, std::vector<std::vector<float>>(beans)};  // one Player, and the Beans
    seen.actions = {{0, {0}, {}, {}}};                               // entity 0, the Player, acts
    auto actions = client.act(seen);
    if (!actions) return 0;
    seen.score = actions->at(0).choices.at(0) == beans;
    seen.actions.clear();
    client.game_over(seen);
  }
} catch (const rlstack::Error& error) {
  std::cerr << "count: " << error.what() << '\n';
  return 1;
}
