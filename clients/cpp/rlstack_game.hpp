// A client for games that rlstack trains on, over version 1 of its game protocol
// (docs/game_protocol.md): one game with one agent, on a POSIX system. C++17, no dependencies.
#pragma once

#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace rlstack {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");

constexpr std::uint32_t kVersion = 1, kMaxFrame = 16 << 20;

enum class Kind : std::uint8_t { categorical, global, select_entity };

struct EntityType { std::string name; std::uint32_t capacity; std::vector<std::string> features; };
struct ActionType {
  std::string name; Kind kind; std::uint32_t capacity; std::vector<std::string> choices;
};
struct Space {
  std::vector<EntityType> entities;
  std::vector<std::string> global_features;
  std::vector<ActionType> actions;
};

// The actors of an action type at this step; entities are numbered through all types.
struct Actors {
  std::uint32_t action;
  std::vector<std::uint32_t> actors, actees;  // actees: for select_entity
  std::vector<std::uint8_t> mask;  // 1 where legal, for each actor and choice; empty: all legal
};
struct Observation {
  double score = 0;  // since the game began; rewards are its differences
  std::vector<std::vector<std::vector<float>>> features;  // by type, one row for each entity
  std::vector<float> global_features;
  std::vector<Actors> actions;
  bool truncated = false;  // in the last observation: only a step limit ended the game
};
struct Action { std::vector<std::uint32_t> actors, choices; };  // choices, or actees

class Error : public std::runtime_error { using std::runtime_error::runtime_error; };

class Client {
 public:
  std::uint64_t seed = 0;  // that the game should use

  // Connects to the trainer that started this program.
  Client(Space space, const std::string& name) : space_(std::move(space)) {
    const char* address = std::getenv("RLSTACK_GAME_ADDRESS");
    const char* token = std::getenv("RLSTACK_GAME_TOKEN");
    if (!address) throw Error("RLSTACK_GAME_ADDRESS is not set; let SocketGame start this program");
    open(address);
    begin(1);
    out_ += "RLGP";
    put(kVersion); text(token ? token : ""); text(name); put(1u);
    put(size(space_.entities));
    for (auto& type : space_.entities) { text(type.name); put(type.capacity); texts(type.features); }
    texts(space_.global_features);
    put(size(space_.actions));
    for (auto& type : space_.actions) {
      text(type.name); put(type.kind); put(type.capacity); texts(type.choices);
    }
    send();
    expect(2);
    if (auto version = get<std::uint32_t>(); version != kVersion)
      throw Error("the protocol's version must be 1; got " + std::to_string(version));
    seed = get<std::uint64_t>();
    end();
  }
  ~Client() { if (socket_ >= 0) ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Returns the actions, one for each action type; nothing if the game must end its loop.
  std::optional<std::vector<Action>> act(const Observation& seen) {
    begin(3);
    put(std::uint8_t{1}); put(1u); put(0u);
    observation(seen);
    send();
    if (!expect(4)) return std::nullopt;
    if (get<std::uint32_t>() != 1 || get<std::uint32_t>() != 0) throw Error("ACT must be for agent 0");
    std::vector<Action> found(space_.actions.size());
    for (auto& action : found) {
      auto count = get<std::uint32_t>();
      for (auto* values : {&action.actors, &action.choices})
        for (std::uint32_t i = 0; i < count; ++i) values->push_back(get<std::uint32_t>());
    }
    end();
    return found;
  }

  // Shows the last observation of a game; the next one begins another game.
  void game_over(const Observation& seen) {
    begin(5);
    put(0u); put(std::uint8_t(seen.truncated));
    observation(seen);
    send();
  }

 private:
  void observation(const Observation& seen) {
    put(seen.score);
    for (auto& rows : seen.features) {
      put(size(rows));
      for (auto& row : rows) for (float value : row) put(value);
    }
    for (float value : seen.global_features) put(value);
    for (std::size_t i = 0; i < space_.entities.size(); ++i) put(std::uint8_t{0});  // all visible
    put(size(seen.actions));
    for (auto& given : seen.actions) {
      Kind kind = space_.actions.at(given.action).kind;
      put(given.action);
      if (kind != Kind::global) numbers(given.actors);
      if (kind == Kind::select_entity) numbers(given.actees);
      put(std::uint8_t(!given.mask.empty()));
      for (auto flag : given.mask) put(flag);
    }
    put(0u);  // metrics
  }

  template <class T> static std::uint32_t size(const T& list) { return std::uint32_t(list.size()); }
  template <class T> void put(T value) { out_.append(reinterpret_cast<char*>(&value), sizeof value); }
  void text(const std::string& value) { put(size(value)); out_ += value; }
  void texts(const std::vector<std::string>& list) { put(size(list)); for (auto& x : list) text(x); }
  void numbers(const std::vector<std::uint32_t>& list) { put(size(list)); for (auto x : list) put(x); }
  void begin(std::uint8_t kind) { out_.assign(4, '\0'); put(kind); }

  void send() {
    auto length = std::uint32_t(out_.size() - 4);
    std::memcpy(out_.data(), &length, 4);
    for (std::size_t at = 0; at < out_.size();) {
      auto sent = ::send(socket_, out_.data() + at, out_.size() - at, MSG_NOSIGNAL);
      if (sent <= 0) throw Error("the trainer has disconnected");
      at += std::size_t(sent);
    }
  }

  std::string receive(std::size_t count) {
    std::string data(count, '\0');
    for (std::size_t at = 0; at < count;) {
      auto got = ::recv(socket_, data.data() + at, count - at, 0);
      if (got <= 0) throw Error("the trainer has disconnected");
      at += std::size_t(got);
    }
    return data;
  }

  // Receives a frame, which must have this kind; returns false for SHUTDOWN.
  bool expect(std::uint8_t kind) {
    std::uint32_t length;
    std::memcpy(&length, receive(4).data(), 4);
    if (length == 0 || length > kMaxFrame) throw Error("a frame must have 1 to 16 MiB");
    in_ = receive(length);
    at_ = 0;
    auto found = get<std::uint8_t>();
    if (found == 6) return false;
    if (found == 7) {
      auto count = get<std::uint32_t>();
      throw Error(count <= in_.size() - at_ ? in_.substr(at_, count) : "a malformed ERROR");
    }
    if (found != kind) throw Error("a frame of kind " + std::to_string(found) + " must not come here");
    return true;
  }

  template <class T> T get() {
    T value;
    if (in_.size() - at_ < sizeof value) throw Error("the frame is too short");
    std::memcpy(&value, in_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  void end() { if (at_ != in_.size()) throw Error("the frame is too long"); }

  void open(const std::string& address) {
    if (address.rfind("unix:", 0) == 0) {
      sockaddr_un place{};
      place.sun_family = AF_UNIX;
      if (address.size() - 5 >= sizeof place.sun_path) throw Error("the path is too long");
      std::memcpy(place.sun_path, address.data() + 5, address.size() - 5);
      socket_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
      if (::connect(socket_, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0) return;
      throw Error("cannot connect to " + address);
    }
    auto colon = address.rfind(':');
    addrinfo hints{}, *places = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (colon == std::string::npos ||
        ::getaddrinfo(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), &hints, &places))
      throw Error("there is no address " + address);
    for (auto* place = places; place; place = place->ai_next) {
      socket_ = ::socket(place->ai_family, place->ai_socktype, place->ai_protocol);
      if (::connect(socket_, place->ai_addr, place->ai_addrlen) == 0) break;
      ::close(socket_);
      socket_ = -1;
    }
    ::freeaddrinfo(places);
    if (socket_ < 0) throw Error("cannot connect to " + address);
    int on = 1;
    ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  Space space_;
  int socket_ = -1;
  std::string out_, in_;
  std::size_t at_ = 0;
};

}  // namespace rlstack
