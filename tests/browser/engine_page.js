/**
 * Put into the test page by test_engine.py: the engine's calls with answers that can leave the page (plain data).
 * @param {'client'|'index'} kind whether the engine runs in its worker or in the page
 */
async (kind) => {
  const { EngineClient, Engine = EngineClient } = await import(`/engine/${kind}.js`);
  const { TercetError } = await import('/engine/errors.js');
  const plain = (error) => ({
    code: error.code,
    message: error.message,
    action: error.action,
    detail: error.detail,
    typed: error instanceof TercetError,
  });

  window.events = [];
  window.engines = [];
  window.lost = [];
  window.Engine = Engine;

  /** @param {() => Promise<any>} make */
  window.attempt = async (make) => {
    try {
      return { value: await make() };
    } catch (error) {
      return { error: plain(error) };
    }
  };

  window.load = (url, options = {}) =>
    attempt(async () => {
      window.events = [];
      const engine = await Engine.load(url, { ...options, onProgress: (event) => window.events.push(event) });
      window.engines.push(engine);
      void engine.lost.then((error) => window.lost.push(plain(error)));
      window.engine = engine;
      return engine.info;
    });

  /** Reads a whole stream; `after(chunks)` may act in between. */
  window.stream = (request, after = () => {}) =>
    attempt(async () => {
      const chunks = [];
      for await (const chunk of await window.engine.chat.completions.create({ ...request, stream: true })) {
        chunks.push(chunk);
        if ((await after(chunks)) === 'leave') break;
      }
      return {
        text: chunks.map(({ choices: [{ delta }] }) => delta.content ?? '').join(''),
        finish: chunks.at(-1).choices[0].finish_reason,
        usage: chunks.at(-1).usage,
        tercet: chunks.at(-1).tercet,
        role: chunks[0].choices[0].delta.role,
        count: chunks.length,
      };
    });
};
