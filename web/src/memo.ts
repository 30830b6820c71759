// preact/compat's memo in a few lines: a component that is drawn anew only when its properties changed.

import { Component, h, type ComponentType } from "preact";

export function memo<P extends object>(inner: ComponentType<P>, same: (a: P, b: P) => boolean): ComponentType<P> {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      return !same(this.props, next);
    }
    render() {
      return h(inner as ComponentType<object>, this.props);
    }
  } as unknown as ComponentType<P>;
}
